"""Measures models of published families that nobody chose against transformers.

    PYTHONPATH=. python tests/interop/odd_models.py FAMILY ... [--seeds 11 12] [--wrapped]

Needs torch and transformers 5. A seed draws a config.json (see odd_configs.py); transformers makes
the model, with every parameter and buffer random, and saves it, in some draws in bfloat16, in three
files, or with the keys of transformers 4. Each check prints a line with its figure and `ok` or
`OFF`; the exit code is 1 if any is off. An import that is refused in one line is shown. With
--wrapped the model is the text part of one with a vision tower, if the family has such models.

A figure above its tolerance is measured again from torch in float64, and is off if it exceeds what
torch's own float32 is off by. Gradients of many gelus in a row, of Gemma 4 for one, need a program
that XLA optimises: XLA_FLAGS=--xla_force_host_platform_device_count=8, as in verified.py.
"""

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import verified  # isort: skip - sets what XLA reads when it begins
import directories
import in_use
import mixer_directories
import numpy as np
import odd_configs
import torch
import transformers

from spmdtrain.cli.published.check import OF_NO_AUTO_CLASS, class_in_transformers
from spmdtrain.config.errors import UserError
from spmdtrain.config.published.read_config import NAME, read_published
from spmdtrain.data.source import open_data
from spmdtrain.inference.sample import make_logits
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.interop.target import Target
from spmdtrain.running.device_batches import batches
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import Imported, import_model
from spmdtrain.train.gradients.differentiable import make_gradients

ROWS, LENGTH = 2, 39
SIZE = (f"train.sequence_length={LENGTH}", f"train.global_batch={ROWS}")
IN_FLOAT32 = ("precision.params=float32", "precision.compute=float32")
# Few shapes, each of which takes seconds to compile: two documents as long, two prefills.
DOCUMENTS, PREFILLS = (20, 20), (5, LENGTH)
LOGITS, CACHED, RELOADED = 4e-6, 3e-6, 1e-6  # rms of the difference, relative
GRADIENTS, OF_STATES = 5e-6, 4e-5  # of the tensor that is furthest off
NOISE = 3  # times what float32 of torch is off by
ZERO = 1e-10  # of the largest gradient: 0, but for rounding
Tensors = dict[str, np.ndarray]
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def made(folder: Path, drawn: odd_configs.Drawn) -> None:
    """Saves a model of a drawn config by transformers, with random numbers in every tensor."""
    config = transformers.AutoConfig.for_model(**drawn.config)
    config._attn_implementation = "eager"
    kind = drawn.config["model_type"]
    name = OF_NO_AUTO_CLASS.get(kind)
    if "text_config" in drawn.config:
        model = transformers.AutoModelForImageTextToText.from_config(config)
    elif name:
        model = getattr(transformers, name)(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(drawn.seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not name.endswith(tuple(directories.XIELU_CONSTANTS)):
            tensor.copy_(numbers(name, tensor, generator))
    model.to(getattr(torch, drawn.dtype))
    size = sum(x.numel() * x.element_size() for x in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // 3 if drawn.parts > 1 else size * 2)
    if drawn.is_older:
        keys = {"architectures": model.config.architectures, "torch_dtype": drawn.dtype}
        text = json.dumps(drawn.config | keys, indent=2)
        (folder / NAME).write_text(text, encoding="utf-8")


def numbers(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns random numbers for a tensor of transformers, of the size that trained ones have."""
    drawn = torch.randn(tensor.shape, generator=generator)
    if name.endswith("A_log"):
        return (torch.rand(tensor.shape, generator=generator) * 1.5 + 0.02).log()
    if name.endswith("dt_bias"):
        return 0.7 * drawn - 0.5
    if "conv" in name and tensor.ndim == 3:
        return 1.2 * drawn / tensor.shape[-1] ** 0.5
    if "embed" in name or "wte" in name or "wpe" in name:
        return 0.2 * drawn
    if tensor.ndim < 2:
        small = 0.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        return small * (tensor + 0.2 * drawn)
    return 0.8 * drawn / tensor.shape[-1] ** 0.5


def loaded(folder: Path, *, may_lack_vision: bool = False) -> Any:
    """Returns the model of transformers in float32, which learns every token."""
    model, loading = class_in_transformers(folder).from_pretrained(
        folder,
        local_files_only=True,
        attn_implementation="eager",
        experts_implementation="eager",  # grouped products want widths that 4 divides
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert may_lack_vision or not any(loading.values()), f"loading {folder.name}: {loading}"
    directories.learn_all_tokens(model)
    return model.eval()


@contextmanager
def doubled() -> Iterator[None]:
    """Makes what transformers computes in float32, whatever its inputs, float64."""
    former = torch.float32, torch.float, torch.Tensor.float
    try:
        torch.float32 = torch.float = torch.float64
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = former


def in_torch(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, Tensors]:
    """Returns the logits, and the gradients by the names of files that hold the text part alone."""
    ids = torch.tensor(tokens)
    logits = model(ids, use_cache=False).logits
    shifted = logits[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(shifted, ids[:, 1:].flatten()).backward()
    gradients = directories.gradients_in_torch(model)
    of_text = {text_name(name): x for name, x in gradients.items() if "vision" not in name}
    return logits.detach().double().numpy(), of_text


class InTransformers:
    """A saved model as transformers computes it, on tokens of its own."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / NAME).read_text(encoding="utf-8"))
        vocab = config.get("text_config", config)["vocab_size"]
        self.folder = folder
        self.tokens = np.random.default_rng(1).integers(0, vocab, (ROWS, LENGTH + 1))

    @cached_property
    def in_float32(self) -> tuple[np.ndarray, Tensors]:
        return in_torch(loaded(self.folder, may_lack_vision=True), self.tokens)

    @cached_property
    def in_float64(self) -> tuple[np.ndarray, Tensors]:
        model = loaded(self.folder, may_lack_vision=True).double()
        with doubled():
            return in_torch(model, self.tokens)

    @cached_property
    def noise(self) -> float:
        """How far float32 is from float64 in the logits."""
        return directories.apart(self.in_float32[0], self.in_float64[0])

    @cached_property
    def noise_of_a_token(self) -> float:
        """How far float32 is from float64 in the logits of the token that is furthest off."""
        pairs = (x.reshape(-1, x.shape[-1]) for x in (self.in_float32[0], self.in_float64[0]))
        return max(directories.apart(*pair) for pair in zip(*pairs, strict=True))


def text_name(name: str) -> str:
    """Returns the name of a tensor of a wrapper in files of its text part."""
    return name.replace("language_model.model.", "model.").replace("language_model.", "")


def in_spmdtrain(
    imported: Imported, folder: Path, tokens: np.ndarray
) -> tuple[np.ndarray, Tensors]:
    """Returns what `in_torch` does, as the imported run computes it."""
    setup = imported.setup
    logits = np.asarray(make_logits(setup)(imported.params, tokens), np.float64)
    _, data = open_data(setup.config, lambda seed, index: tokens[index % ROWS])  # noqa: ARG005
    with batches(setup, data, 0, 0) as ahead:
        gradients = make_gradients(setup)(imported.params, next(ahead))
    published = read_published(folder)
    model = setup.config.model
    target = Target(model, published.family, {}, "float32", setup.config.finetune)
    found: Tensors = {}
    for path, value in gradients.items():
        whole = verified.in_layers(setup, path, value)
        entry, mapped, layers = target.mapped(path, whole.shape)
        for layer in layers:
            one = whole if layer is None else whole[layer]
            directories.put(found, entry.of_layer(layer), mapped.write(one))
    return logits, found


class Checks:
    """The lines of one model, and whether any of them is off."""

    def __init__(self, name: str) -> None:
        self.name, self.is_off = name, False

    def say(self, what: str, figure: str, *, is_ok: bool) -> None:
        print(f"{self.name}: {what}: {figure} {'ok' if is_ok else 'OFF'}", flush=True)
        self.is_off |= not is_ok

    def within(self, what: str, error: float, tolerance: float) -> None:
        self.say(what, verified.shown(error), is_ok=error <= tolerance)

    def attempted(self, what: str, measured: Callable[[], None]) -> None:
        """Runs a check; an exception is a line that is off, behind its traceback."""
        try:
            measured()
        except Exception as error:  # noqa: BLE001 - what goes wrong is what is looked for
            traceback.print_exc(limit=-3)
            self.say(what, f"{type(error).__name__}: {str(error):.200}", is_ok=False)


def check_numbers(checks: Checks, imported: Imported, theirs: InTransformers) -> None:
    """Compares logits and gradients with transformers in float32, or else in float64."""
    logits, gradients = theirs.in_float32
    our_logits, ours = in_spmdtrain(imported, theirs.folder, theirs.tokens)
    our_logits = our_logits[..., : logits.shape[-1]]
    missing = {name for name, x in gradients.items() if x.any()} - ours.keys()
    checks.say("names of gradients", str(sorted(missing)[:3] or ""), is_ok=not missing)
    error = directories.apart(our_logits, logits)
    if error <= LOGITS:
        checks.within("logits", error, LOGITS)
    else:
        error = directories.apart(our_logits, theirs.in_float64[0])
        figures = f"{verified.shown(error)} of float64, torch {verified.shown(theirs.noise)}"
        checks.say("logits", figures, is_ok=error <= max(LOGITS, NOISE * theirs.noise))
    has_states = "delta" in imported.setup.config.model.layer_mixers
    tolerance = OF_STATES if has_states else GRADIENTS
    both = gradients.keys() & ours.keys()
    worst = max(directories.apart(ours[name], gradients[name]) for name in both)
    if worst <= tolerance:
        checks.within("gradients", worst, tolerance)
        return
    exact = theirs.in_float64[1]
    largest = max(size(x) for x in exact.values())
    over: dict[str, tuple[float, str]] = {}  # by how much of what is allowed a tensor is off
    for name in both:
        # A router that has no choice has a gradient of 0, but for rounding.
        whole = size(exact[name]) if size(exact[name]) > ZERO * largest else largest
        error, noise = (size(x - exact[name]) / whole for x in (ours[name], gradients[name]))
        figures = f"{verified.shown(error)} of float64, torch {verified.shown(noise)}: {name}"
        over[name] = error / max(tolerance, NOISE * noise), figures
    most, figures = max(over.values())
    checks.say("gradients", figures, is_ok=most <= 1)


def size(x: np.ndarray) -> float:
    """Returns the root of the mean square."""
    return float(np.sqrt(np.mean(x**2)))


def check_use(checks: Checks, imported: Imported, theirs: InTransformers) -> None:
    """Compares packed documents with each alone, and logits behind a cache with the whole's."""
    for what, measured, at in (
        ("packed", in_use.packed, DOCUMENTS),
        ("cached", in_use.cached, PREFILLS),
    ):
        error = measured(imported.setup, imported.params, at)
        tolerance = CACHED if error <= CACHED else max(CACHED, NOISE * theirs.noise_of_a_token)
        checks.within(what, error, tolerance)


def check_export(checks: Checks, run: Path, folder: Path, out: Path) -> None:
    """Compares the export's tensors with those of the files, bit by bit, and loads it."""
    export_run(run, out)
    kind = json.loads((out / NAME).read_text(encoding="utf-8"))["model_type"]
    as_published = mixer_directories.AS_PUBLISHED.get(kind, dict)
    exported = {text_name(name): x.map() for name, x in open_tensors(out).items()}
    saved = as_published({text_name(name): x.map() for name, x in open_tensors(folder).items()})
    other = [
        name
        for name, x in exported.items()
        if name not in saved or saved[name].dtype != x.dtype or not np.array_equal(saved[name], x)
    ]
    checks.say("export", f"{len(exported)} tensors, others {other[:3]}", is_ok=not other)
    before, after = loaded(folder, may_lack_vision=True), loaded(out)
    ids = 3 * torch.arange(LENGTH)[None] % before.get_input_embeddings().num_embeddings
    with torch.no_grad():
        logits = [m(ids, use_cache=False).logits.double().numpy() for m in (after, before)]
    checks.within("logits of the export", directories.apart(*logits), RELOADED)


def check(drawn: odd_configs.Drawn) -> bool:
    """Runs every check of a model, and returns True if any is off."""
    checks = Checks(drawn.name)
    with tempfile.TemporaryDirectory() as temporary:
        folder, run, out = (Path(temporary) / name for name in ("model", "run", "out"))
        try:
            made(folder, drawn)
        except Exception as error:  # noqa: BLE001 - a draw that is no model
            print(f"{drawn.name}: transformers makes none: {error!r:.300}", flush=True)
            return False
        try:
            imported = import_model(folder, run, overrides=(*SIZE, *IN_FLOAT32))
        except UserError as error:
            print(f"{drawn.name}: refused: {error}", flush=True)
            return False
        except Exception as error:  # noqa: BLE001 - a crash is a finding
            traceback.print_exc(limit=-3)
            checks.say("import", repr(error)[:200], is_ok=False)
            return True
        theirs = InTransformers(folder)
        checks.attempted("numbers", lambda: check_numbers(checks, imported, theirs))
        checks.attempted("use", lambda: check_use(checks, imported, theirs))
        checks.attempted("export", lambda: check_export(checks, run, folder, out))
    return checks.is_off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", default=[*directories.CONFIGS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[11])
    parser.add_argument("--wrapped", action="store_true")
    parser.add_argument("--config", action="store_true", help="only print what is drawn")
    asked = parser.parse_args()
    is_off = False
    for family in asked.families:
        if asked.wrapped and family not in odd_configs.WRAPPERS:
            continue
        for seed in asked.seeds:
            drawn = odd_configs.draw(family, seed, is_wrapped=asked.wrapped)
            if asked.config:
                print(json.dumps(drawn.config, indent=2))
                continue
            is_off |= check(drawn)
    return int(is_off)


if __name__ == "__main__":
    sys.exit(main())
