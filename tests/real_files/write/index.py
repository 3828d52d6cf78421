"""Saves documents as Megatron's indexed dataset: FOLDER KIND."""

import json
import pathlib
import sys

import numpy as np
import torch
from megatron.core.datasets import indexed_dataset

folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
folder.mkdir(parents=True)
rng = np.random.default_rng(0)
documents = [rng.integers(0, 250, size).tolist() for size in (5, 1, 17, 3)]
dtype = np.int32 if kind == "int32" else np.uint16
multimodal = kind == "with modes"


def write(prefix, documents):
    builder = indexed_dataset.IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=dtype, multimodal=multimodal
    )
    for document in documents:
        ids = torch.tensor(document)
        if multimodal:
            builder.add_item(ids, 1)
            builder.end_document()
        elif kind == "sequences in documents":
            half = len(document) // 2
            lengths = [half, len(document) - half] if half else [len(document)]
            builder.add_document(ids, lengths)
        else:
            builder.add_document(ids, [len(document)])
    builder.finalize(f"{prefix}.idx")


if kind == "merged":
    write(folder / "a", documents[:2])
    write(folder / "b", documents[2:])
    builder = indexed_dataset.IndexedDatasetBuilder(str(folder / "text.bin"), dtype=dtype)
    for part in ("a", "b"):
        builder.add_index(str(folder / part))
    builder.finalize(str(folder / "text.idx"))
else:
    write(folder / "text", documents)
(folder / "expected.json").write_text(json.dumps(documents))
