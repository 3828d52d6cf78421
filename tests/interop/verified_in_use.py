"""Measures each family in use, and writes two tables of the docs: see in_use.py.

    PYTHONPATH=. python tests/interop/verified_in_use.py [FAMILY ...] [--further] [--write]

Needs torch, transformers and peft. With --further only the second table. Gradients on meshes are
compared with those of one device.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import directories
import in_use
import numpy as np
import verified
from verified import shown

from spmdtrain.config.errors import UserError
from spmdtrain.config.schema.finetune import LINEAR
from spmdtrain.interop.peft.adapter_config import OF_MAMBA
from spmdtrain.running.published.import_model import Imported, import_model
from spmdtrain.train.gradients.differentiable import make_gradients

LENGTH, SEQUENCES = 40, 4
DOCUMENTS = (13, 1, 18, 8)  # tokens of each in a row: of four devices, none begins where one does
SIZE = (f"train.sequence_length={LENGTH}", f"train.global_batch={SEQUENCES}")
PACKED = ("data.packing=documents",)
# Heads that the devices of these meshes share, where a family has the key.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "n_head": 8}
HEADS |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
HEADS |= {"mamba_num_heads": 8, "n_groups": 4, "mamba_n_heads": 8, "mamba_n_groups": 4}
HEADS |= {"mamba_d_head": 12, "mamba_d_ssm": 96, "mamba_expand": 2}
# Their number of heads stays: it decides the width of a head, or the factors of its positions.
OWN_HEADS = ("phi3", "olmoe")


def divisible(name: str) -> dict:
    """The config of a family's tiny model, in which meshes split every kind of head."""
    config = (directories.CONFIGS | directories.VARIANTS)[name]
    keys = config.keys() - ({"num_attention_heads"} if name in OWN_HEADS else set())
    heads = {key: value for key, value in HEADS.items() if key in keys}
    return config | (heads if name not in OWN_HEADS else {}) | verified.DIVISIBLE.get(name, {})


@dataclass(frozen=True)
class InUse:
    """A family's tiny model, in a folder of its own."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @cached_property
    def imported(self) -> Imported:
        return import_model(self.model, self.folder / "imported", overrides=SIZE)

    @cached_property
    def of_whole_rows(self) -> dict[str, np.ndarray]:
        return self.gradients(())

    @cached_property
    def of_documents(self) -> dict[str, np.ndarray]:
        return self.gradients(PACKED)

    def gradients(self, settings: tuple[str, ...]) -> dict[str, np.ndarray]:
        """The gradients of four sequences, layers in order."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            imported = import_model(self.model, Path(folder) / "run", overrides=(*SIZE, *settings))
        setup = imported.setup
        batch = setup.to_devices(documents if "segment_ids" in setup.batch else rows, np.arange(4))
        on_mesh = make_gradients(setup)(imported.params, batch)
        return {path: verified.in_layers(setup, path, x) for path, x in on_mesh.items()}

    def on_mesh(self, *settings: str) -> str:
        """How far the gradients of a mesh are from those of one device, or that it is refused."""
        try:
            on_mesh = self.gradients(settings)
        except UserError as error:
            print(error)
            return "refused"
        packed = PACKED[0] in settings
        one_device = self.of_documents if packed else self.of_whole_rows
        return shown(max(directories.apart(on_mesh[path], one_device[path]) for path in one_device))


def rows(ids: np.ndarray) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(1).integers(0, directories.VOCAB, (SEQUENCES, LENGTH + 1))
    return {
        "tokens": tokens[ids, :-1].astype(np.int32),
        "targets": tokens[ids, 1:].astype(np.int32),
        "mask": np.ones((len(ids), LENGTH), np.float32),
        "sample": ids.astype(np.uint32),
    }


def documents(ids: np.ndarray) -> dict[str, np.ndarray]:
    segments = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS)
    positions = np.concatenate([np.arange(length) for length in DOCUMENTS])
    return rows(ids) | {
        "segment_ids": np.tile(segments, (len(ids), 1)).astype(np.int32),
        "positions": np.tile(positions, (len(ids), 1)).astype(np.int32),
    }


def context(devices: int, method: str, *settings: str) -> Callable[[InUse], str]:
    mesh = (f"mesh.context={devices}", f"model.context_attention={method}")
    return lambda family: family.on_mesh(*mesh, *settings)


def experts(family: InUse) -> str:
    has_experts = family.imported.setup.config.model.experts is not None
    return family.on_mesh("mesh.expert=2") if has_experts else "no experts"


def lora(family: InUse) -> str:
    without_out = json.loads((family.model / "config.json").read_text())["model_type"] in OF_MAMBA
    targets = [name for name in LINEAR if not (without_out and name == "out")]
    settings = ("finetune.kind=lora", f"finetune.targets={','.join(targets)}")
    tuned, base = in_use.adapters(family.model, family.folder, settings)
    assert base > 1e-3
    return shown(tuned) + (", without `out`" if without_out else "")


def of_model(measured: Callable) -> Callable[[InUse], str]:
    return lambda family: measured(family.imported.setup, family.imported.params)


Columns = dict[str, Callable[[InUse], str]]
IN_USE: Columns = {
    "context 2, ring": context(2, "ring"),
    "context 2, ulysses": context(2, "ulysses"),
    "expert 2": experts,
    "packed": of_model(lambda *model: shown(in_use.packed(*model)) + ", no bit leaks"),
    "cached": of_model(lambda *model: shown(in_use.cached(*model))),
    "three steps of AdamW": lambda family: shown(in_use.three_steps(family.model, family.folder)),
    "LoRA in peft": lora,
}
FURTHER: Columns = {
    "context 4 with documents, ring": context(4, "ring", *PACKED),
    "context 4 with documents, ulysses": context(4, "ulysses", *PACKED),
    "context 4 with documents, gather": context(4, "gather", *PACKED),
    "prompts of three lengths": of_model(in_use.sampled),
    "FLOPs of the planner": of_model(lambda setup, _: in_use.planned(setup)),
}
TABLES = {"in use": IN_USE, "in use, further": FURTHER}  # by the marks around them


def measure(name: str, columns: Columns) -> str:
    """Returns a family's row."""
    with tempfile.TemporaryDirectory() as folder:
        family = InUse(Path(folder))
        directories.write(family.model, divisible(name))
        cells = [name]
        for column, measured in columns.items():
            cells.append(measured(family))
            print(f"{name}: {column}: {cells[-1]}", flush=True)
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> None:
    options = {argument for argument in arguments if argument.startswith("--")}
    names = [argument for argument in arguments if argument not in options]
    for name in names or verified.FAMILIES:
        for table, columns in TABLES.items():
            if table == "in use" and "--further" in options:
                continue
            row = measure(name, columns)
            print(row, flush=True)
            if "--write" in options:
                head = f"| family | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)
                begin, end = f"<!-- {table}: begin -->", f"<!-- {table}: end -->"
                verified.write_table(begin, end, head, [row])


if __name__ == "__main__":
    main(sys.argv[1:])
