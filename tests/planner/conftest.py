"""A small config that estimates in milliseconds."""

from pathlib import Path

import pytest

SMALL = """
[model]
name = "llama"
layers = 8
embed = 512
heads = 8
kv_heads = 8
vocab = 32768
[train]
global_batch = 32
microbatch = 1
sequence_length = 1024
[precision]
compute = "bfloat16"
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)
