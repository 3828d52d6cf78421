"""An export writes, and an import believes, no key but those that the family's class reads.

The classes of transformers are the reader that people use. `make test-hf` runs them.
"""

import copy
from pathlib import Path

import directories
import drawn_models
import jax
import pytest

from spmdtrain.cli.published.check import OF_NO_AUTO_CLASS, check_logits
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.load import from_resolved
from spmdtrain.config.published.class_keys import CHOOSING, READ
from spmdtrain.config.published.families.all_families import FAMILIES
from spmdtrain.config.published.read_config import as_published, read_published
from spmdtrain.config.published.rope_keys import FULL, SHARE, WINDOW
from spmdtrain.config.published.write_config import as_model, function_of, write_config
from spmdtrain.interop.target import Target
from spmdtrain.running.published.read_weights import read_weights
from spmdtrain.train.shard import shard

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def written(model):
    """The family that a model is exported as, and its config.json; None if it is of none."""
    try:
        return write_config(model, None, dtype="float32", tokens=NO_TOKENS, run=Path("run"))
    except ConfigError:
        return None


def test_a_share_of_channels_is_exported_only_where_a_class_turns_a_share():
    llama = {"name": "llama", "layers": 2, "embed": 32, "heads": 4, "vocab": 64, "max_length": 32}
    family, keys = written(as_model(llama | {"rope_share": 0.5})) or ("none", {})
    assert (family, keys.get(SHARE)) == ("phi3", 0.5)
    for more, theirs in (({"qkv_bias": True}, "glm"), ({"norm_places": "both"}, "glm4")):
        family, keys = written(as_model(llama | more | {"rope_share": 0.25})) or ("none", {})
        assert (family, keys.get(SHARE)) == (theirs, 0.25)
    for more in ({"out_bias": True}, {"query_norm": "head"}, {"norm_places": "after"}):
        assert written(as_model(llama | more | {"rope_share": 0.5})) is None


def test_drawn_settings_are_exported_with_keys_that_their_class_reads():
    """And a key that a class does not read, put into its file, is refused or changes nothing."""
    exported = 0
    for model in drawn_models.models(range(600)):
        if (found := written(model)) is None:
            continue
        exported += 1
        family, keys = found
        unread = CHOOSING - READ[family]
        assert not unread & keys.keys(), (family, unread & keys.keys())
        if SHARE not in READ[family]:
            assert SHARE not in str(keys)
        for key in sorted(unread - {"layer_types"})[:: 1 + exported % 7]:
            try:
                read = as_published(Path(), keys | {key: drawn_models.OTHER_VALUES[key]})
            except ConfigError:
                continue
            assert function_of(as_model(read.settings)) == function_of(model), (family, key)
    assert exported > 200


# --- transformers itself --------------------------------------------------------------------------


@pytest.mark.hf
@pytest.mark.parametrize("seed", range(48))
def test_a_model_of_drawn_settings_has_the_logits_of_transformers(seed, tmp_path):
    """A model that is not refused is what the class computes from the exported folder."""
    models = [*drawn_models.models(range(10 * seed, 10 * seed + 10))]
    found = [(model, said) for model in models if (said := written(model))]
    if not found:
        pytest.skip("all ten are of no family")
    model, (family, keys) = found[-1]
    print(f"\n{family}: {logits_of_transformers(model, family, keys, tmp_path)}")


@pytest.mark.hf
@pytest.mark.parametrize("length", [8, 16, 64])
def test_a_model_that_came_in_at_another_length_has_the_logits_of_transformers(length, tmp_path):
    settings = as_published(Path(), dict(directories.CONFIGS["phi3"])).settings
    model = as_model(settings | {"max_length": length})
    family, keys = written(model) or ("none", {})
    logits_of_transformers(model, family, keys, tmp_path)


@pytest.mark.hf
@pytest.mark.parametrize("scaling", drawn_models.SCALINGS)
@pytest.mark.parametrize("name", drawn_models.TURNING)
def test_a_scaling_written_by_hand_has_the_logits_of_transformers_or_is_refused(
    name, scaling, tmp_path
):
    model = drawn_models.scaled_by_hand(name, scaling)
    family, keys = written(model) or pytest.skip("no family has it")
    logits_of_transformers(model, family, keys, tmp_path)


def logits_of_transformers(model, family: str, keys: dict, folder: Path) -> str:
    """Writes a folder of random weights and compares; raises ConfigError if logits differ."""
    directories.skip_unless_known(family)
    values = {"precision": {"params": "float32", "compute": "float32"}}
    values |= {"train": {"sequence_length": 16}, "data": {"corpus": "synthetic"}}
    config = from_resolved({"config": values, "origin": {}}).model_copy(update={"model": model})
    setup = shard(config, devices=jax.devices()[:1])
    target = Target(model, family, keys, "float32", config.finetune)
    shapes = {path: tuple(x.shape) for path, x in setup.state.params.items()}
    scale = 0.0 if config.model.norm_offset else 1.0
    directories.write(folder, keys, directories.drawn(target.shapes(shapes), scale=scale))
    params, _ = read_weights(setup, read_published(folder))
    return check_logits(folder, setup, params)


def outcome(values: dict):
    """What a class of transformers makes of a config.json: the names and shapes of its parameters,
    and its logits; or None if it refuses it.
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)  # its threads wait busily: on a busy machine eight times the work
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    try:
        config = mapping[values["model_type"]].from_dict(copy.deepcopy(values))
        name = OF_NO_AUTO_CLASS.get(values["model_type"], "AutoModelForCausalLM")
        kind = getattr(transformers, name)
        make = getattr(kind, "from_config", None) or kind._from_config  # that of no Auto class
        model = make(config, attn_implementation="eager")
        model = model.float().eval()
        numbers = torch.Generator().manual_seed(0)
        held = [*model.named_parameters(), *model.named_buffers()]
        with torch.no_grad():
            for name, tensor in sorted(held, key=lambda pair: pair[0]):
                if "inv_freq" in name:
                    continue
                around = 1.0 if "norm" in name else 0.0
                tensor.copy_(around + 0.3 * torch.randn(tensor.shape, generator=numbers))
            logits = model(3 * torch.arange(40)[None] % directories.VOCAB).logits
    except Exception:  # noqa: BLE001 - whatever it raises, it computes nothing
        return None
    return {name: x.shape for name, x in model.state_dict().items()}, logits


def is_same(one, other) -> bool:
    import torch  # pyright: ignore[reportMissingImports]

    return one[0] == other[0] and bool(torch.allclose(one[1], other[1], rtol=1e-6, atol=1e-6))


def contexts(family: str) -> list[dict]:
    """The config.json of a family's models, with and without windows and layers without experts:
    where a key may choose something.
    """
    known = [*directories.CONFIGS.values(), *directories.VARIANTS.values()]
    drawn = []
    for base in (base for base in known if base["model_type"] == family):
        drawn.append(base)
        if family == "gpt2":
            continue
        kinds = [WINDOW if number % 2 else FULL for number in range(base["num_hidden_layers"])]
        window = base | {"sliding_window": 7}
        used = window | {"use_sliding_window": True, "max_window_layers": 1}
        drawn += [window, used, used | {"layer_types": kinds}]
        drawn.append({name: value for name, value in base.items() if name != "no_rope_layers"})
        if "sliding_window_pattern" in READ[family] and "layer_types" in base:
            listed = ("layer_types", "mlp_layer_types")
            by_period = {name: value for name, value in base.items() if name not in listed}
            drawn.append(by_period | {"sliding_window_pattern": 3})
        if "mlp_only_layers" in base:
            drawn.append(base | {"mlp_only_layers": [0]})
    return [context for at, context in enumerate(drawn) if context not in drawn[:at]]


@pytest.mark.hf
@pytest.mark.parametrize("family", READ)
def test_the_table_has_the_keys_that_the_class_reads(family):
    """In every context that its class accepts, a key outside the table changes nothing; one inside
    changes something, or is refused, in at least one of them.
    """
    directories.skip_unless_known(family)
    ways = {key: set() for key in CHOOSING}
    for context in contexts(family):
        before = outcome(context)
        if before is None:
            continue
        for key in (key for key in CHOOSING if "changed" not in ways[key]):
            for value in drawn_models.other_values(key, context):
                after = outcome(context | {key: value})
                same = after is not None and is_same(before, after)
                ways[key].add("refused" if after is None else "same" if same else "changed")
    changed = {key for key in CHOOSING if "changed" in ways[key]}
    refused = {key for key in CHOOSING if "refused" in ways[key]}
    renamed = set(FAMILIES[family].renamed)
    assert changed - renamed <= READ[family]
    assert READ[family] <= changed | refused
