"""A published model is read at the length of the run that uses it, and goes out at that length."""

import directories
import pytest

from spmdtrain.config import RunConfig, load
from spmdtrain.config.published.read_config import read_published
from spmdtrain.config.published.write_config import write_config
from spmdtrain.running.published.as_run import model_config
from spmdtrain.running.start import init_from

ORIGINAL = 16  # of the phi3 below; it was published for more
LENGTHS = (8, ORIGINAL, ORIGINAL + 1, 64)
FAMILIES = directories.CONFIGS | directories.VARIANTS


def imported(folder, length):
    return model_config(folder, [f"model.max_length={length}"])[1]


def read_from(folder, length):
    file = folder / "run.toml"
    file.write_text(f"[model]\nfrom = {str(folder)!r}\n[train]\nsequence_length = 8\n")
    return load(file, [f"model.max_length={length}"])


def in_python(folder, length):
    """`max_length` follows from the sequences of the run."""
    settings = read_published(folder).settings | {"max_length": None}
    return RunConfig(model=settings, train={"sequence_length": length})


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("read", [imported, read_from, in_python])
def test_the_length_of_the_run_chooses_the_factors_of_longrope(read, length, tmp_path):
    directories.write(tmp_path, FAMILIES["phi3"])
    scaling = read(tmp_path, length).model.rope_scaling
    assert scaling.use == ("long" if length > ORIGINAL else "short")
    assert scaling.divisors == (scaling.long if length > ORIGINAL else scaling.short)


def test_a_run_in_python_starts_from_the_factors_of_its_length(tmp_path):
    directories.write(tmp_path, FAMILIES["phi3"])
    init_from._check_function(read_published(tmp_path), in_python(tmp_path, ORIGINAL))


def test_factors_that_are_chosen_by_hand_stay(tmp_path):
    directories.write(tmp_path, FAMILIES["phi3"])
    overrides = [f"model.max_length={ORIGINAL}", "model.rope_scaling.use=long"]
    scaling = model_config(tmp_path, overrides)[1].model.rope_scaling
    assert scaling is not None and scaling.use == "long"


@pytest.mark.parametrize("length", (8, ORIGINAL))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_came_in_at_a_shorter_length_can_go_out(name, length, tmp_path):
    """`write_config` reads what it writes, and refuses what no family computes."""
    directories.write(tmp_path, FAMILIES[name])
    published, config = model_config(tmp_path, [f"model.max_length={length}"])
    family, keys = write_config(config.model, published, dtype="float32", tokens={}, run=tmp_path)
    assert family == published.family
    lengths = ("max_position_embeddings", "n_positions", "model_max_length")
    written = next(keys[name] for name in lengths if name in keys)
    if name.startswith("phi3") and FAMILIES[name]["rope_scaling"]:
        # Of transformers' class: three keys and no others, scaled by the published length.
        assert keys["rope_scaling"] == FAMILIES[name]["rope_scaling"]
        assert written == FAMILIES[name]["max_position_embeddings"]
    else:
        assert written == length
