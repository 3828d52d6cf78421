"""Files and `--set` strings become one RunConfig, or one clear line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.checkpoints.identity import flat, settings_of
from spmdtrain.config import (
    ConfigError,
    RunConfig,
    from_resolved,
    json_schema,
    load,
    resolved,
    to_toml,
)
from spmdtrain.config.run_files import given_in

CONFIGS = Path(__file__).parent.parent.parent / "configs"
BASE = '[train]\nsteps = 50\n[optimizer]\nname = "adamw"\nbeta1 = 0.8\nlearning_rate = 0.5\n'


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into an empty working directory, so that messages hold short names."""
    monkeypatch.chdir(tmp_path)

    def write(**files: str) -> None:
        for name, text in files.items():
            Path(f"{name}.toml").write_text(text)

    return write


# --- what is obeyed ---


def test_a_files_warm_up_is_cut_to_the_steps_that_were_typed(write):
    write(x=BASE + "warmup = 20\n")
    config = load("x.toml", ["train.steps=3"])
    assert config.optimizer.warmup == 3
    assert config.origin["optimizer.warmup"] == "x.toml, cut to train.steps"
    assert config.notes == [
        "optimizer.warmup=20 (x.toml) is cut to 3, the train.steps that were typed"
    ]
    assert load("x.toml").notes == [] and load("x.toml").optimizer.warmup == 20


def test_every_committed_config_loads_and_names_the_schema():
    files = sorted(CONFIGS.glob("*.toml"))
    assert len(files) >= 4
    for file in files:
        assert file.read_text().startswith("#:schema ./schema.json\n# "), file
        assert set(load(file).origin.values()) == {str(file)}


def test_extends_chains_and_the_later_file_wins(write):
    write(
        root=BASE,
        middle='extends = "root.toml"\n[train]\nseed = 1\nsteps = 60\n',
        top='extends = "middle.toml"\n[train]\nseed = 2\n',
    )
    config = load("top.toml")
    assert (config.train.steps, config.train.seed, config.optimizer.beta1) == (60, 2, 0.8)
    assert config.origin == {
        "train.steps": "middle.toml",
        "train.seed": "top.toml",
        "optimizer.name": "root.toml",
        "optimizer.beta1": "root.toml",
        "optimizer.learning_rate": "root.toml",
    }


def test_extends_is_relative_to_the_file_that_says_it(write):
    Path("inner").mkdir()
    write(root=BASE)
    Path("inner/x.toml").write_text('extends = "../root.toml"')
    assert load("inner/x.toml").train.steps == 50


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.steps=7", 7),
        ("train.clip=none", None),
        ("train.clip = 2", 2.0),
        ("train.zero=1", 1),
        ("train.init_from=123", "123"),
        ("model.bias=false", False),
        ("model.name=llama", "llama"),
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("data.tokenizer=a=b", "a=b"),
        ("log.profile=3,4", (3, 4)),
        ("log.profile=[3, 4]", (3, 4)),
        ("log.profile=", ()),
        ("rules.activations.time=context", ("context",)),
        ("rules.parameters.vocab=", ()),
        ("rules.parameters.vocab=tensor,fsdp", ("tensor", "fsdp")),
    ],
)
def test_an_override_is_parsed_by_the_type_of_its_field(write, override, value):
    write(x=BASE)
    config = load("x.toml", [override])
    key = override.partition("=")[0].strip()
    found = config.model_dump()
    for name in key.split("."):
        found = found[name]
    assert found == value and type(found) is type(value)
    assert config.origin[key] == "--set"


@pytest.mark.parametrize(
    ("text", "value"),
    [("123", "123"), ("a,b.txt", "a,b.txt"), ("[a, 'b']", ("a", "b")), ("[ab]*.txt", "[ab]*.txt")],
)
def test_a_data_path_is_a_string_unless_it_is_bracketed(write, text, value):
    write(x='[data]\ncorpus = "text"\npath = "other"')
    assert load("x.toml", [f"data.path={text}"]).data.path == value


def test_the_last_of_two_overrides_wins(write):
    write(x="")
    assert load("x.toml", ["train.steps=3", "train.steps=4"]).train.steps == 4


def test_an_integer_in_a_file_becomes_a_float_and_none_switches_off(write):
    write(x='[train]\nclip = "none"\n[optimizer]\nlearning_rate = 1')
    config = load("x.toml")
    assert config.train.clip is None
    assert repr(config.optimizer.learning_rate) == "1.0"


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.name=sgd", "optimizer.momentum=0.5"],
        ["optimizer.momentum=0.5", "optimizer.name=sgd"],
    ],
)
def test_another_name_on_the_command_line_drops_the_files_table_in_any_order(write, overrides):
    write(x=BASE)
    config = load("x.toml", overrides)
    assert config.optimizer.model_dump(exclude_unset=True) == {"name": "sgd", "momentum": 0.5}
    assert config.origin == {
        "train.steps": "x.toml",
        "optimizer.name": "--set",
        "optimizer.momentum": "--set",
    }


def test_another_name_in_an_extending_file_drops_the_earlier_table(write):
    write(root=BASE, x='extends = "root.toml"\n[optimizer]\nname = "sgd"\nmomentum = 0.5\n')
    config = load("x.toml")
    assert config.optimizer.model_dump(exclude_unset=True) == {"name": "sgd", "momentum": 0.5}
    assert "optimizer.beta1" not in config.origin


LLAMA3 = """[model]
name = "llama"
[model.rope_scaling]
kind = "llama3"
factor = 8.0
original_length = 32
high_factor = 5.0
"""


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.rope_scaling.kind=linear", "model.rope_scaling.factor=2"],
        ["model.rope_scaling.factor=2", "model.rope_scaling.kind=linear"],
    ],
)
def test_another_kind_of_scaling_drops_the_earlier_one(write, overrides):
    """Its settings belong to the kind before; by hand, nobody could take them out."""
    linear = '[model.rope_scaling]\nkind = "linear"\nfactor = 2.0\n'
    write(root=LLAMA3, x=f'extends = "root.toml"\n{linear}')
    for config in (load("x.toml"), load("root.toml", overrides)):
        scaling = config.model.rope_scaling
        assert scaling.model_dump(exclude_unset=True) == {"kind": "linear", "factor": 2.0}
        assert "model.rope_scaling.high_factor" not in config.origin
        assert config.model.name == "llama"


def test_a_setting_of_a_scaling_changes_that_one_alone(write):
    write(x=LLAMA3)
    more = ["model.rope_scaling.kind=llama3", "model.rope_scaling.factor=2"]
    scaling = load("x.toml", more).model.rope_scaling
    assert (scaling.factor, scaling.high_factor, scaling.original_length) == (2.0, 5.0, 32)
    with pytest.raises(ConfigError, match="model.rope_scaling.factor is missing"):
        load("x.toml", ["model.rope_scaling.kind=yarn"])


def test_the_same_name_keeps_the_earlier_table_even_where_it_was_the_default(write):
    write(
        root="[model]\nlayers = 9", x='extends = "root.toml"\n[model]\nname = "gpt"\nembed = 64\n'
    )
    assert load("x.toml", ["model.name=gpt"]).model.layers == 9


# --- what is refused ---

UNKNOWN = "unknown key"
# text of x.toml, overrides, what the line must hold
BAD = {
    "unknown key in a file": (
        "[train]\nstep = 3",
        [],
        [UNKNOWN, "train.step ", "x.toml", "did you mean train.steps?", "global_batch"],
    ),
    "unknown key in --set": (
        "",
        ["model.layer=3"],
        [UNKNOWN, "model.layer ", "--set", "did you mean model.layers?"],
    ),
    "unknown section": (
        "[trian]\nsteps = 3",
        [],
        [UNKNOWN, "trian", "x.toml", "did you mean train?", "checkpoint"],
    ),
    "unknown empty section": ("[trian]", [], [UNKNOWN, "trian", "x.toml", "did you mean train?"]),
    "key without its section": (
        "",
        ["steps=3"],
        [UNKNOWN, "steps", "--set", "did you mean train.steps?"],
    ),
    "key in the wrong section": (
        "[train]\nlearning_rate = 1.0",
        [],
        [UNKNOWN, "x.toml", "did you mean optimizer.learning_rate?"],
    ),
    "key of another class": (
        "",
        ["optimizer.momentum=0.5"],
        [UNKNOWN, "optimizer.momentum", "belongs to optimizer.name='muon' or 'sgd'", "beta1"],
    ),
    "key of the class before": (
        BASE,
        ["optimizer.name=sgd", "optimizer.beta1=0.5"],
        [
            UNKNOWN,
            "optimizer.beta1",
            "which belongs to optimizer.name='adamw' or 'lamb' or 'lion' or 'muon'",
        ],
    ),
    "key below a value": (
        "[train.steps]\nx = 1",
        [],
        [UNKNOWN, "train.steps.x", "x.toml", "train.steps is a value"],
    ),
    "key below a value in --set": (
        "",
        ["train.steps.x=1"],
        [UNKNOWN, "train.steps.x", "--set", "train.steps is a value"],
    ),
    "key below a rule": (
        "",
        ["rules.activations.a.b=1"],
        [UNKNOWN, "rules.activations.a is a value", "--set"],
    ),
    "extends in --set": ("", ["extends=y.toml"], [UNKNOWN, "extends", "--set"]),
    "string for an integer": (
        '[train]\nsteps = "3"',
        [],
        ["train.steps='3'", "x.toml", "must be an integer"],
    ),
    "float for an integer": (
        "[train]\nsteps = 3.0",
        [],
        ["train.steps=3.0", "x.toml", "must be an integer"],
    ),
    "word for an integer": (
        "",
        ["train.steps=many"],
        ["train.steps='many'", "--set", "must be an integer"],
    ),
    "empty integer": ("", ["train.steps="], ["train.steps=''", "--set", "must be an integer"]),
    "none where there must be a number": (
        "",
        ["train.steps=none"],
        ["train.steps='none'", "--set", "an integer"],
    ),
    "boolean for a number": (
        "[train]\nclip = true",
        [],
        ["train.clip=True", "x.toml", "must be a number"],
    ),
    "boolean for a choice of integers": (
        "[train]\nzero = true",
        [],
        ["train.zero=True", "x.toml", "must be 0 or 1"],
    ),
    "word for a boolean": (
        "",
        ["model.bias=perhaps"],
        ["model.bias='perhaps'", "--set", "must be true or false"],
    ),
    "number for text": (
        '[data]\ncorpus = "text"\npath = 3',
        [],
        ["data.path=3", "x.toml", "a string or a list"],
    ),
    "text for a list": (
        '[log]\nprofile = "3"',
        [],
        ["log.profile='3'", "x.toml", "must be a list"],
    ),
    "text in a list": (
        '[log]\nprofile = [3, "4"]',
        [],
        ["log.profile=[3, '4']", "x.toml", "an integer"],
    ),
    "text in a list in --set": (
        "",
        ["log.profile=3,x"],
        ["log.profile='3,x'", "--set", "an integer"],
    ),
    "text for a rule": (
        '[rules.activations]\ntime = "data"',
        [],
        ["rules.activations.time='data'", "x.toml", "a list"],
    ),
    "misspelt choice": (
        "",
        ["optimizer.schedule=cosin"],
        ["optimizer.schedule='cosin'", "--set", "did you mean 'cosine'?"],
    ),
    "misspelt name": (
        '[model]\nname = "lama"\nlayers = 2',
        [],
        ["model.name='lama'", "x.toml", "did you mean 'llama'?"],
    ),
    "misspelt name in --set": (
        "[model]\nlayers = 2",
        ["model.name=lama"],
        ["model.name='lama'", "--set", "'gpt' or 'llama'"],
    ),
    "name that is not a text": (
        "[model]\nname = [1]",
        [],
        ["model.name=[1]", "x.toml", "'gpt' or 'llama'"],
    ),
    "too small": ("[train]\nsteps = 0", [], ["train.steps=0", "x.toml", "greater than 0"]),
    "negative in --set": (
        "",
        ["optimizer.learning_rate=-1"],
        ["optimizer.learning_rate=-1.0", "--set", "greater than 0"],
    ),
    "too large": (
        "",
        ["data.validation_fraction=1"],
        ["data.validation_fraction=1.0", "--set", "less than 1"],
    ),
    "not a number": (
        "[optimizer]\nlearning_rate = nan",
        [],
        ["optimizer.learning_rate=nan", "x.toml"],
    ),
    "infinite": (
        "",
        ["optimizer.learning_rate=inf"],
        ["optimizer.learning_rate=inf", "--set", "finite"],
    ),
    "scalar for a section": ("train = 3", [], ["train=3", "x.toml", "[train]"]),
    "scalar for a section with a name": ('model = "gpt"', [], ["model='gpt'", "x.toml", "[model]"]),
    "scalar for a section in --set": (
        "",
        ["model=gpt"],
        ["model='gpt'", "--set", "is a section", "model."],
    ),
    "scalar for a table of rules": (
        "",
        ["rules.parameters=data"],
        ["rules.parameters='data'", "rules.parameters.NAME="],
    ),
    "no equals sign": ("", ["train.steps"], ["--set 'train.steps' is not KEY=VALUE"]),
    "no key": ("", ["=3"], ["--set '=3' is not KEY=VALUE"]),
    "not TOML": ("[train\nsteps = 3", [], ["x.toml", "not TOML", "line 1"]),
    "extends a number": ("extends = 3", [], ["extends=3", "x.toml", "must be a string"]),
    "extends itself": ('extends = "x.toml"', [], ["x.toml extends itself", "x.toml -> x.toml"]),
    "extends a missing file": (
        'extends = "xx.toml"',
        [],
        ["no config file xx.toml (extended by x.toml)", "try x.toml"],
    ),
    "keys that do not fit": (
        "[model]\nembed = 65",
        ["model.heads=2"],
        ["model.embed=65", "model.heads=2", "model.embed from x.toml", "model.heads from --set"],
    ),
    "sections that do not fit": (
        "[train]\nsteps = 5",
        ["optimizer.warmup=9"],
        ["optimizer.warmup from --set", "train.steps from x.toml"],
    ),
    "a consequence of keys": (
        "[model]\nname = 'llama'\nembed = 6\nheads = 2",
        [],
        ["model.head_dim=3", "from x.toml"],
    ),
    "two axes filled": (
        "[mesh]\ndata = -1",
        ["mesh.fsdp=-1"],
        ["mesh.data from x.toml", "mesh.fsdp from --set"],
    ),
}


def test_a_link_that_leads_to_itself_is_one_line(write):
    write(x='extends = "circle.toml"')
    Path("circle.toml").symlink_to("circle.toml")
    with pytest.raises(
        ConfigError, match="circle.toml .extended by x.toml. cannot be read: Too many levels"
    ):
        load("x.toml")


@pytest.mark.parametrize(("text", "overrides", "parts"), BAD.values(), ids=BAD)
def test_a_mistake_is_one_line_that_names_key_value_and_origin(write, text, overrides, parts):
    write(x=text)
    with pytest.raises(ConfigError) as caught:
        load("x.toml", overrides)
    line = str(caught.value)
    for part in parts:
        assert part in line
    assert "\n" not in line and len(line) < 400
    for raw in ("validation error", "pydantic", "Input should", "Value error", "()"):
        assert raw not in line
    assert caught.value.__cause__ is None
    assert caught.value.exit_code == 4


def test_a_missing_file_names_its_neighbour(write):
    write(quickstart="")
    with pytest.raises(
        ConfigError,
        match=r"no config file quickstrat.toml; found quickstart.toml; try quickstart.toml",
    ):
        load("quickstrat.toml")
    with pytest.raises(
        ConfigError, match="no config file nowhere/x.toml; found no TOML file in nowhere"
    ):
        load("nowhere/x.toml")


def test_a_directory_and_a_binary_file_are_refused(write):
    write()
    Path("folder.toml").mkdir()
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"folder.toml cannot be read: Is a directory"):
        load("folder.toml")
    with pytest.raises(ConfigError, match=r"binary.toml is not TOML"):
        load("binary.toml")


def test_a_cycle_of_files_is_shown(write):
    write(a='extends = "b.toml"', b='extends = "c.toml"', c='extends = "a.toml"')
    with pytest.raises(ConfigError, match=r"a.toml -> b.toml -> c.toml -> a.toml"):
        load("a.toml")


def test_a_long_value_is_cut(write):
    write(x="")
    with pytest.raises(ConfigError, match=r"train.steps='x{76}\.\.\. \(from --set\)"):
        load("x.toml", ["train.steps=" + "x" * 10_000])


# --- out again ---


def text(**sizes):
    """Any text but the one character that no path may hold."""
    return st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), **sizes)


SETTINGS = {
    ("train", "steps"): st.integers(500, 2**31 - 1),
    ("train", "clip"): st.none() | st.floats(1e-30, 1e30),
    ("train", "init_from"): st.none() | text(),
    ("train", "zero"): st.sampled_from([0, 1]),
    ("model", "name"): st.sampled_from(["gpt", "llama"]),
    ("model", "kv_heads"): st.none() | st.sampled_from([1, 2, 4]),
    ("model", "bias"): st.booleans(),
    ("optimizer", "name"): st.sampled_from(["adamw", "sgd"]),
    ("optimizer", "learning_rate"): st.floats(1e-37, 1e37),
    ("data", "corpus"): st.just("text"),
    ("data", "path"): text(min_size=1) | st.lists(text(), min_size=1),
    ("log", "profile"): st.lists(st.integers(1, 500)),
    ("rules", "parameters"): st.dictionaries(text(), st.lists(text())),
    ("rules", "activations"): st.dictionaries(st.text("ab.\"'\\\n ]#"), st.lists(text())),
}


@st.composite
def runs(draw):
    tables = {}
    for section, name in SETTINGS:
        if section == "data" or draw(st.booleans()):
            tables.setdefault(section, {})[name] = draw(SETTINGS[section, name])
    return from_resolved({"config": tables, "origin": {}})


def is_text_of_toml(config: RunConfig) -> bool:
    """The string "none" is None in TOML, by definition."""
    return "none" not in (config.data.path, config.train.init_from)


@pytest.mark.core
@pytest.mark.seconds
@given(runs().filter(is_text_of_toml))
def test_what_to_toml_writes_loads_back(tmp_path_factory, config):
    file = tmp_path_factory.getbasetemp() / "round.toml"
    file.write_text(to_toml(config), encoding="utf-8", newline="")
    assert load(file).model_dump() == config.model_dump()


@given(runs())
def test_what_resolved_gives_reads_back_through_json_with_its_origins(config):
    again = from_resolved(json.loads(json.dumps(resolved(config))))
    assert again == config
    assert again.origin == config.origin


def test_each_line_of_to_toml_says_where_its_value_came_from(write):
    write(x=BASE)
    lines = to_toml(
        load("x.toml", ["optimizer.beta1=0.7", "rules.parameters.embed=fsdp", "train.clip=none"])
    ).splitlines()
    assert "steps = 50  # x.toml" in lines
    assert "beta1 = 0.7  # --set" in lines
    assert "seed = 0  # default" in lines
    assert 'embed = ["fsdp"]  # --set' in lines
    assert 'clip = "none"  # --set' in lines
    assert all("  # " in line for line in lines if " = " in line)
    assert not any(line.startswith("microbatch") for line in lines)


def test_resolved_names_every_value_and_its_origin(write):
    write(x=BASE)
    values = resolved(load("x.toml", ["mesh.data=2"]))
    assert values["config"]["mesh"]["data"] == 2
    assert values["config"]["model"]["kv_heads"] == 4
    assert values["origin"]["mesh.data"] == "--set"
    assert values["origin"]["train.steps"] == "x.toml"
    assert values["origin"]["model.kv_heads"] == "derived"
    assert set(values["origin"].values()) == {"--set", "x.toml", "default", "derived"}


def test_derived_settings_follow_from_others_in_copies_and_in_a_resolved_config_too(write):
    write(x=BASE)
    config = load("x.toml", ["train.sequence_length=96", "model.head_dim=16"])
    model, frozen = config.model, config.precision.frozen
    assert (model.ffn, model.max_length, frozen) == (4 * model.embed, 96, "float32")
    assert model.is_given("head_dim") and not model.is_given("ffn")
    wider = config.model_copy(update={"model": model.model_copy(update={"embed": 256})})
    assert (wider.model.ffn, wider.model.head_dim, wider.model.max_length) == (1024, 16, 96)
    train = config.train.model_copy(update={"sequence_length": 64})
    assert config.model_copy(update={"train": train}).model.max_length == 64
    again = from_resolved(resolved(config), ["model.embed=256", "train.sequence_length=64"])
    assert (again.model.ffn, again.model.head_dim, again.model.max_length) == (1024, 16, 64)
    assert again.as_given()["model"]["ffn"] is None


def test_a_resolved_config_without_derived_settings_derives_them(write):
    """As runs wrote it in which they were None."""
    write(x=BASE)
    config = load("x.toml")
    origin = {key: "default" for key in resolved(config)["origin"]}
    older = from_resolved({"config": config.as_given(), "origin": origin})
    assert older.model_dump() == config.model_dump()
    assert older.as_given() == config.as_given()


def test_a_resolved_config_of_another_version_is_one_line(write):
    write(x=BASE)
    values = resolved(load("x.toml"))
    values["config"]["train"]["gone"] = 3
    values["origin"]["train.gone"] = "default"
    with pytest.raises(ConfigError, match=r"unknown key train.gone \(from config.json\)"):
        from_resolved(values)
    with pytest.raises(ConfigError, match="not a resolved config; found train"):
        from_resolved({"train": {}})


# --- editors and speed ---


def test_the_committed_schema_is_current():
    assert json.loads((CONFIGS / "schema.json").read_text()) == json_schema(), "make schema"


def test_the_schema_asks_for_nothing_and_knows_no_null():
    schema = json_schema()
    # No other file can add to an entry of a list, so that it has to be complete.
    assert schema["$defs"]["MixPhase"].pop("required") == ["tokens", "weights"]
    assert schema["$defs"]["MixSource"].pop("required") == ["name", "path"]
    assert schema["$defs"]["ParameterGroup"].pop("required") == ["match"]
    text = json.dumps(schema)
    assert '"required"' not in text and "null" not in text and "oneOf" not in text
    assert "extends" in json_schema()["properties"]
    assert json_schema()["additionalProperties"] is False


def test_the_config_room_imports_neither_jax_nor_numpy():
    modules = subprocess.run(
        [sys.executable, "-c", "import sys, spmdtrain.config; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=CONFIGS.parent,
    ).stdout.split()
    assert "spmdtrain.config.load" in modules
    assert not {"jax", "jaxlib", "flax", "optax", "numpy"}.intersection(modules)


def types_in(annotation) -> set:
    """Every plain type that an annotation is made of."""
    parts = get_args(annotation)
    return set().union(*map(types_in, parts)) if parts else {annotation}


def numeric_settings() -> list[tuple[str, str]]:
    """(dotted key, "integer" or "number") of every such setting, of every class of a section."""
    found = set()
    for section, field in RunConfig.model_fields.items():
        for settings in types_in(field.annotation) | {type(field.default)}:
            for name, own in getattr(settings, "model_fields", {}).items():
                kinds = types_in(own.annotation)
                found |= {(f"{section}.{name}", "integer")} if int in kinds else set()
                found |= {(f"{section}.{name}", "number")} if float in kinds else set()
    return sorted(found)


OWNERS = {"optimizer.momentum": ["optimizer.name=sgd"]}


@pytest.mark.parametrize(("key", "kind"), numeric_settings())
def test_no_number_is_taken_that_devices_cannot_count_or_hold(key, kind):
    """Beyond int32 and float32: refused by name, unless it is a size that is compared with the
    devices there are.
    """
    beyond = ["3000000000", "-3000000000"] if kind == "integer" else ["1e300", "1e-300", "-1e300"]
    fits = {
        "train.seed": ["3000000000"],
        "data.validation_fraction": ["1e-300"],
        "model.dropout": ["1e-300"],
    }
    as_good_as_0 = (
        "islands.momentum",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.momentum",
        "train.label_smoothing",
    )
    fits |= dict.fromkeys(as_good_as_0, ["1e-300"])
    for value in beyond:
        if value in fits.get(key, []) or (key.startswith("mesh.") and not value.startswith("-")):
            continue
        with pytest.raises(ConfigError, match=re.escape(key)):
            from_resolved(resolved(RunConfig()), [*OWNERS.get(key, []), f"{key}={value}"])


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.head_dim=32",),
        ("guard.policy=skip",),
        ("islands.outer=average",),
        ("sparsity.pattern=kept",),
        ("sparsity.pattern=magnitude", "sparsity.until=30"),
    ],
)
def test_what_a_run_records_compares_with_its_settings(overrides):
    """Also where a version that derived nothing recorded it: it wrote null."""
    config = load(CONFIGS / "quickstart.toml", overrides)
    then, now = flat(given_in(json.loads(json.dumps(resolved(config))))), settings_of(config)
    assert set(then) < set(now)
    assert {name: then.get(name) for name in now} == now
    assert from_resolved(resolved(config)) == config
