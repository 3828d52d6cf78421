"""Measures each family in use, and writes the second table of the docs: see in_use.py.

    PYTHONPATH=. python tests/interop/verified_in_use.py [FAMILY ...] [--write]

Needs torch, transformers and peft. Gradients on meshes are compared with those of one device.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import directories
import in_use
import numpy as np
import verified

from spmdtrain.config.errors import UserError
from spmdtrain.data.source import open_data
from spmdtrain.running.device_batches import batches
from spmdtrain.running.published.import_model import import_model
from spmdtrain.train.gradients.differentiable import make_gradients

BEGIN, END = "<!-- in use: begin -->", "<!-- in use: end -->"
SIZE = ("train.sequence_length=40", "train.global_batch=4")
MESHES = {
    "context 2, ring": ("mesh.context=2", "model.context_attention=ring"),
    "context 2, ulysses": ("mesh.context=2", "model.context_attention=ulysses"),
    "expert 2": ("mesh.expert=2",),
}
HEAD = (
    f"| family | {' | '.join(MESHES)} | packed | cached | three steps of AdamW | LoRA in peft |",
    "|---|" + "---|" * (len(MESHES) + 4),
)


def gradients(model: Path, run: Path, mesh: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The gradients of four sequences on a mesh, layers in order."""
    imported = import_model(model, run, overrides=(*SIZE, *mesh))
    tokens = np.random.default_rng(1).integers(0, directories.VOCAB, (4, 41))
    _, data = open_data(imported.setup.config, lambda seed, index: tokens[index % 4])  # noqa: ARG005
    with batches(imported.setup, data, 0, 0) as ahead:
        on_mesh = make_gradients(imported.setup)(imported.params, next(ahead))
    return {path: verified.in_layers(imported.setup, path, x) for path, x in on_mesh.items()}


def measure(name: str, folder: Path) -> list[str]:
    """Returns the cells of a family's row."""
    config = directories.CONFIGS[name] | verified.DIVISIBLE.get(name, {})
    model = folder / "model"
    directories.write(model, config)
    one_device = gradients(model, folder / "one", ())
    imported = import_model(model, folder / "imported", overrides=SIZE)
    setup, params = imported.setup, imported.params

    def on_mesh(label: str) -> str:
        if label.startswith("expert") and setup.config.model.experts is None:
            return "no experts"
        on_mesh = gradients(model, folder / label.replace(" ", ""), MESHES[label])
        return shown(max(directories.apart(on_mesh[path], one_device[path]) for path in one_device))

    cells = [refused(lambda label=label: on_mesh(label)) for label in MESHES]
    cells.append(shown(in_use.packed(setup, params)) + ", no bit leaks")
    cells.append(shown(in_use.cached(setup, params)))
    cells.append(shown(in_use.three_steps(model, folder)))
    tuned, base = in_use.adapters(model, folder, ("finetune.kind=lora",))
    assert base > 1e-3
    return [name, *cells, shown(tuned)]


def shown(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def refused(measured: Callable[[], str]) -> str:
    """Returns what was measured, or that the settings were refused."""
    try:
        return measured()
    except UserError as error:
        print(error)
        return "refused"


def main(names: list[str]) -> None:
    write = "--write" in names
    rows = []
    for name in [name for name in names if name != "--write"] or list(directories.CONFIGS):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(f"| {' | '.join(measure(name, Path(folder)))} |")
        print(rows[-1], flush=True)
    if write:
        verified.write_table(BEGIN, END, HEAD, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
