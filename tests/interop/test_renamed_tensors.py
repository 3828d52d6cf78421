"""Files of transformers 5.24 that name or cut tensors in another way than published ones are the
same models, and go out as published ones.
"""

import re
from dataclasses import replace

import directories
import ml_dtypes
import numpy as np
import pytest
from mixer_directories import IN_MEMORY, SAVED_BY_5_24
from test_expert_layouts import opened, parameters_and_tensors

from spmdtrain.config.errors import CheckpointError
from spmdtrain.interop.names.family_names import NAMES
from spmdtrain.interop.names.spellings import spelled

WAYS = [(family, ways[family]) for ways in (SAVED_BY_5_24, IN_MEMORY) for family in ways]


@pytest.mark.parametrize(("family", "save"), WAYS)
def test_they_are_the_published_model_and_go_out_as_it(family, save, tmp_path):
    published = directories.write(tmp_path / "published", directories.CONFIGS[family], parts=3)
    saved = save(published)
    assert saved.keys() != published.keys()
    directories.write(tmp_path / "saved", directories.CONFIGS[family], saved)
    wanted, exported = parameters_and_tensors(tmp_path / "published")
    assert exported.keys() == published.keys()
    assert all(np.array_equal(x, exported[name]) for name, x in published.items())
    parameters, exported = parameters_and_tensors(tmp_path / "saved")
    assert parameters.keys() == wanted.keys()
    assert all(np.array_equal(x, wanted[at]) for at, x in parameters.items())
    assert exported.keys() == published.keys()
    assert all(np.array_equal(x, exported[name]) for name, x in published.items())


@pytest.mark.parametrize(("family", "save"), WAYS)
def test_a_renamed_tensor_stays_in_its_file_and_as_wide_as_it_was(family, save, tmp_path):
    config = directories.CONFIGS[family] | {"dtype": "bfloat16"}
    published = directories.drawn(directories.tensors_of(config), ml_dtypes.bfloat16)
    renamed = sorted(published.keys() - save(published).keys())
    joined = [name for name in renamed if "_conv1d" in name]
    wide = joined[:3] or renamed[-1:]  # of one layer, which may be one tensor
    published |= {name: published[name].astype(np.float32) for name in wide}
    directories.write(tmp_path, config, save(published), parts=3)
    _, target, shapes = opened(tmp_path)
    dtypes = replace(target, dtype="bfloat16").dtypes(shapes)
    assert sorted(x for x, dtype in dtypes.items() if dtype == "float32") == wide
    files = target.files(dtypes)
    assert files is not None
    assert len(files) == 3
    assert sorted(name for names in files for name in names) == sorted(published)


PREFIXES = [
    *((family, spelling) for family in NAMES for spelling in NAMES[family].kept_spellings),
    ("gemma3_text", ("model.", "model.language_model.")),
]


@pytest.mark.parametrize(("family", "spelling"), PREFIXES)
def test_a_prefix_goes_out_as_it_came_where_transformers_keeps_it(family, spelling, tmp_path):
    """In bfloat16 files with one tensor in float32, which stays so in either case."""
    config = directories.CONFIGS[family] | {"dtype": "bfloat16"}
    published = directories.drawn(directories.tensors_of(config), ml_dtypes.bfloat16)
    wide = max(published)
    published[wide] = published[wide].astype(np.float32)
    spelt = {spelled(name, spelling): x for name, x in published.items()}
    assert spelt.keys() != published.keys()
    directories.write(tmp_path, config, spelt, parts=2)
    _, exported = parameters_and_tensors(tmp_path)
    wanted = spelt if NAMES[family].kept_spellings else published
    assert exported.keys() == wanted.keys()
    assert all(np.array_equal(exported[name], x) for name, x in wanted.items())
    _, target, shapes = opened(tmp_path)
    dtypes = replace(target, dtype="bfloat16").dtypes(shapes)
    assert dtypes == {name: str(x.dtype) for name, x in wanted.items()}


def test_rows_that_are_cut_elsewhere_are_refused(tmp_path):
    """Joined they would be as many, but nobody writes them."""
    config = directories.CONFIGS["olmo_hybrid"]
    tensors = directories.drawn(directories.tensors_of(config))
    query, key = (f"model.layers.1.linear_attn.{part}_conv1d.weight" for part in "qk")
    tensors |= {
        query: tensors[query][:-1],
        key: np.concatenate([tensors[query][-1:], tensors[key]]),
    }
    directories.write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=re.escape(f"{query} of {tmp_path} has the shape")):
        parameters_and_tensors(tmp_path)
