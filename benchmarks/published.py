"""What `spmdtrain import` and `export` cost beside transformers' `from_pretrained` and
`save_pretrained` of the same folder: processor seconds, of whole processes and of each gigabyte.

The folder holds a Llama with random weights in bfloat16, in files of 200 MB. In turns, each in a
process of its own: `import` makes a run of it, `export` a folder of that run, and transformers
loads the folder and saves it. What a process costs without weights, its imports above all, is
measured with a model of a megabyte; the rest is divided by the gigabytes. The tensors of the
exported folder must be those of the first one, bit by bit.

Processor seconds are compared, as other programs hardly move them. Those in the kernel are printed
beside: on a virtual machine, each GB of memory that its host has to find first costs it 2 seconds
and more, for which no contender is to blame. So two more processes take turns with them, which
compute nothing: one fills as much fresh memory as the folder has bytes, as an import does for the
parameters, and one writes as many bytes into a new file, as all three do. One round is run before
those that count. torch and transformers must be installed.

    python benchmarks/published.py [--rounds N] [--layers N] [--json FILE]
"""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from spmdtrain.interop.safetensors_files import open_tensors

MAKE = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

embed, ffn, layers, vocab = map(int, sys.argv[2:])
config = LlamaConfig(
    hidden_size=embed,
    intermediate_size=ffn,
    num_hidden_layers=layers,
    vocab_size=vocab,
    num_attention_heads=embed // 64,
    num_key_value_heads=embed // 256,
    max_position_embeddings=2048,
    dtype="bfloat16",
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).to(torch.bfloat16)
model.save_pretrained(sys.argv[1], max_shard_size="200MB")
"""
LOAD_AND_SAVE = """
import sys
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2], max_shard_size="200MB")
"""
FILL_MEMORY = """
import sys

memory = bytearray(int(sys.argv[1]))
for start in range(0, len(memory), 4096):
    memory[start] = 1
"""
WRITE_FILE = """
import os
import sys

size, path = int(sys.argv[1]), sys.argv[2]
piece = os.urandom(2**20) * 32
with open(path, "wb", buffering=0) as file:
    while (written := file.tell()) < size:
        file.write(memoryview(piece)[: size - written])
    os.fsync(file)
"""
SMALL = (256, 512, 1, 512)  # embed, ffn, layers, vocab
LARGE = (2048, 5632)  # embed and ffn of TinyLlama
VOCAB = 32000
THEIRS = "transformers"
MEMORY, FILE = "memory", "a file"  # what the kernel takes for as many bytes


class Seconds(NamedTuple):
    """Processor seconds of a process, and those of them that it spent in the kernel."""

    all: float
    kernel: float


Round = Mapping[str, Seconds]  # of each contender


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8, help="8 make 1 GB (default)")
    parser.add_argument("--json", metavar="FILE")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), parsed.rounds, parsed.layers)
    print(json.dumps(result))
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(result))


def measure(folder: Path, rounds: int, layers: int) -> dict:
    small, large = folder / "small", folder / "large"
    python_seconds(MAKE, str(small), *map(str, SMALL))
    python_seconds(MAKE, str(large), *map(str, (*LARGE, layers, VOCAB)))
    size = bytes_of(large) / 1e9
    in_turns(small, folder)
    starts = [in_turns(small, folder) for _ in range(rounds)]
    in_turns(large, folder)
    wholes = [in_turns(large, folder) for _ in range(rounds)]
    return report(starts, wholes, size)


def in_turns(model: Path, folder: Path) -> Round:
    """Returns the processor seconds of each contender, for the published folder `model`."""
    run, exported, saved = folder / "run", folder / "exported", folder / "saved"
    ours = (sys.executable, "-m", "spmdtrain")
    seconds = {
        "import": processor_seconds([*ours, "import", str(model), "--out", str(run)]),
        "export": processor_seconds([*ours, "export", str(run), "--to", "hf", str(exported)]),
        THEIRS: python_seconds(LOAD_AND_SAVE, str(model), str(saved)),
        MEMORY: python_seconds(FILL_MEMORY, str(bytes_of(model))),
        FILE: python_seconds(WRITE_FILE, str(bytes_of(model)), str(folder / "written")),
    }
    check_same(model, exported)
    (folder / "written").unlink()
    for made in (run, exported, saved):
        shutil.rmtree(made)
    return seconds


def bytes_of(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def python_seconds(program: str, *arguments: str) -> Seconds:
    return processor_seconds([sys.executable, "-c", program, *arguments])


def processor_seconds(command: Sequence[str]) -> Seconds:
    """Runs a command, and returns the seconds that its process has used of all processors."""
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} failed: {done.stderr[-2000:]}")
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    kernel = ended.ru_stime - begun.ru_stime
    return Seconds(ended.ru_utime - begun.ru_utime + kernel, kernel)


def check_same(model: Path, exported: Path) -> None:
    """Exits if the tensors of two folders differ in a bit."""
    wanted, written = open_tensors(model), open_tensors(exported)
    assert wanted.keys() == written.keys(), "the export has other tensors"
    for name, tensor in wanted.items():
        same = tensor.map().tobytes() == written[name].map().tobytes()
        assert same, f"{name} was exported as something else"


def report(starts: Sequence[Round], wholes: Sequence[Round], size: float) -> dict:
    """Returns the figures for --json, which it prints as a table first."""
    start, whole = medians(starts), medians(wholes)
    per_gigabyte = {
        name: Seconds(*((b - a) / size for a, b in zip(start[name], whole[name], strict=True)))
        for name in whole
    }
    ratios = {name: seconds.all / whole[THEIRS].all for name, seconds in whole.items()}
    print(f"{size:.2f} GB in bfloat16, {len(wholes)} rounds, medians of processor seconds")
    heads = ("start", "whole", "(range)", "/ theirs", "a GB", "in kernel", "/ theirs")
    print(f"{'':12}", *(f"{head:>10}" for head in heads))
    for name, (seconds, _) in whole.items():
        measured = [each[name].all for each in wholes]
        extent = f"{min(measured):.2f}-{max(measured):.2f}"
        of_process = f"{start[name].all:10.2f} {seconds:10.2f} {extent:>10} {ratios[name]:10.2f}"
        a_gigabyte, kernel = per_gigabyte[name]
        of_weights = (
            f"{a_gigabyte:10.2f} {kernel:10.2f} {a_gigabyte / per_gigabyte[THEIRS].all:10.2f}"
        )
        print(f"{name:12} {of_process} {of_weights}")
    return {
        "gigabytes": size,
        "start": start,
        "whole": whole,
        "seconds_per_gigabyte": per_gigabyte,
        "whole_over_theirs": ratios,
    }


def medians(rounds: Sequence[Round]) -> dict[str, Seconds]:
    return {
        name: Seconds(*map(statistics.median, zip(*(each[name] for each in rounds), strict=True)))
        for name in rounds[0]
    }


if __name__ == "__main__":
    main()
