"""[own]: parts of one's own by name, as if they had been given to `run` as keywords."""

import json
import shutil
import sys
from pathlib import Path

import jax
import optax
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.config import ConfigError, load, to_toml
from spmdtrain.config.own_parts import own_list, own_part
from spmdtrain.lab.certify.shrink import shrink

EXAMPLES = Path(__file__).parents[2] / "examples"
DEVICES = jax.devices()
SMALL = (
    *("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "model.layers=1", "model.embed=16"),
    *("model.heads=2", "train.sequence_length=12", "train.global_batch=4", "train.steps=3"),
    *("eval.every=3", "eval.batches=1", "checkpoint.every=2"),
)
PARTS = """
import optax
import spmdtrain as st

RATE = 0.5
ready = optax.scale_by_adam()
def maker(momentum=0.9): return optax.trace(momentum)
def rules(path, parameter, momentum=0.9): return optax.trace(momentum)
def of_config(config): return lambda step: config.train.steps * 1e-3
def rate(step, config, peak): return peak / config.train.steps
def short(logits): return logits
def fails(logits, targets): return {}["nothing"]
def bursts(config): raise ValueError("no good day")
def anything(*given, **further): return (given, further)
def watch(event, step, figures, mark): return mark
class Patience:
    def __init__(self, config, steps): self.config, self.steps = config, steps
    def __call__(self, event, step, figures): return step >= self.steps
class Sink:
    def __init__(self, directory, config, step, mark="none"):
        self.given = directory, config, step, mark
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PARTS)


def named(*settings: str) -> st.RunConfig:
    return tiny("train.steps=4", *settings)


@pytest.mark.usefixtures("parts")
def test_a_name_leads_to_the_part_or_to_what_makes_it():
    assert isinstance(own_part(named("own.optimizer=mine.py:ready"), "optimizer"), tuple)
    made = own_part(named("own.optimizer=mine.py:maker"), "optimizer")
    assert isinstance(made, optax.GradientTransformation)
    rules = own_part(named("own.optimizer=mine.py:rules"), "optimizer")
    assert isinstance(rules("path", None), optax.GradientTransformation)
    assert own_part(named("own.learning_rate=mine.py:of_config"), "learning_rate")(0) == 4e-3
    of_library = own_part(named("own.optimizer=optax:scale_by_lion"), "optimizer")
    assert isinstance(of_library, optax.GradientTransformation)
    assert own_part(named(), "loss") is None


@pytest.mark.usefixtures("parts")
def test_arguments_and_the_config_are_given_by_name():
    config = named("own.learning_rate=mine.py:rate", "own.arguments.learning_rate.peak=2.0")
    assert own_part(config, "learning_rate")(0) == 0.5
    config = named("own.hooks=mine.py:watch,mine.py:Patience", "own.arguments.hooks.steps=3")
    config = config.model_copy(
        update={
            "own": config.own.model_copy(update={"arguments": {"hooks": {"steps": 3, "mark": 1}}})
        }
    )
    watch, patience = own_list(config, "hooks")
    assert watch("step", 1, {}) == 1
    assert [patience("step", step, {}) for step in (2, 3)] == [False, True]
    config = named("own.sinks=mine.py:Sink", "own.arguments.sinks.mark=x")
    (sink,) = own_list(config, "sinks")
    assert sink("directory", "config", 3).given == ("directory", "config", 3, "x")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("own.loss=mine.py",), "own.loss='mine.py' is not FILE.py:NAME or package.module:NAME"),
        (
            ("own.loss=none.py:f",),
            "own.loss='none.py:f': none.py: No such file or directory; found mine.py",
        ),
        (("own.loss=nopackage:f",), "ModuleNotFoundError: No module named 'nopackage'"),
        (
            ("own.loss=mine.py:f",),
            "own.loss='mine.py:f': mine.py has no name f; found maker, rules,",
        ),
        (("own.loss=mine.py:short",), "cannot be called as (logits, targets): too many positional"),
        (("own.hooks=mine.py:watch",), "cannot be called as (event, step, figures): missing"),
        (("own.loss=mine.py:fails",), "own.loss='mine.py:fails': KeyError: 'nothing'"),
        (
            ("own.optimizer=mine.py:bursts",),
            "own.optimizer='mine.py:bursts': ValueError: no good day (",
        ),
        (
            ("own.learning_rate=mine.py:RATE",),
            "own.learning_rate='mine.py:RATE' cannot be called as (step): 0.5 is not",
        ),
        (("own.optimizer=mine.py:RATE",), "optimizer=0.5 is not an optimizer"),
        (("own.data=mine.py:RATE",), "data=0.5 is not a source of data"),
        (
            ("own.sinks=mine.py:RATE",),
            "own.sinks='mine.py:RATE' cannot be called as (directory, config, step): 0.5",
        ),
        (
            ("own.loss=mine.py:fails", "own.arguments.loss.gama=1"),
            "unknown key own.arguments.loss.gama (from --set); found no argument of own.loss that",
        ),
        (
            ("own.optimizer=mine.py:rules", "own.arguments.optimizer.momntum=1"),
            "own.arguments.optimizer.momntum (from --set), did you mean momentum?; found momentum",
        ),
        (("own.arguments.loss.gamma=1",), "has values for own.loss, which is not set"),
        (("own.arguments.los.gamma=1",), "there is no part own.los, but optimizer, learning_rate,"),
        (("own.arguments.loss=1",), "own.arguments"),
    ],
)
@pytest.mark.usefixtures("parts")
def test_a_wrong_name_is_one_line(settings, said):
    with pytest.raises(ConfigError) as refused:
        st.run(named("model.vocab=64", *settings), "run", devices=DEVICES[:1])
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert not Path("run").exists()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the example, and a run of it by the command line."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copy(EXAMPLES / "own_parts.py", folder)
    text = (EXAMPLES / "own_parts.toml").read_text().replace("examples/", "")
    (folder / "own_parts.toml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(jax, "devices", lambda *_: DEVICES[:1])
        assert main(typed("train", "own_parts.toml", "--run", "run")) == 0
    return folder


BROKEN = """
import helper
import optax
import spmdtrain as st

def optimizer():
    def update(gradients, state, params=None): raise OverflowError("too far")
    return optax.GradientTransformation(lambda params: (), update)
def rate(step): return {}["rate"]
def loss(logits, targets): return helper.fails(logits)
def source(): return st.Source(lambda seed, sample: open("nowhere"))
class Sink:
    def __init__(self, directory, config, step): pass
    def metrics(self, step, figures): self.rows.append(step)
    def event(self, event, step, values): pass
    def close(self): pass
def hook(event, step, figures): raise LookupError(event)
class Model(st.Transformer):
    def head(self, x_bte, ctx): return self.nothing
"""
RAISED = {
    "own.optimizer=broken.py:optimizer": ("OverflowError: too far", "line 7"),
    "own.learning_rate=broken.py:rate": ("KeyError: 'rate'", "line 9"),
    "own.loss=broken.py:loss": ("TypeError: ", "helper.py, line 1"),
    "own.data=broken.py:source": ("FileNotFoundError: ", "line 11"),
    "own.sinks=broken.py:Sink": (
        "AttributeError: 'Sink' object has no attribute 'rows'",
        "line 14",
    ),
    "own.hooks=broken.py:hook": ("LookupError: step", "line 17"),
    "model.make=broken.py:Model": ("AttributeError: ", "line 19"),
}


@pytest.mark.parametrize("setting", RAISED)
@pytest.mark.usefixtures("parts")
def test_an_error_of_own_code_is_a_traceback_for_its_author_and_one_line(
    setting, monkeypatch, capsys
):
    monkeypatch.setattr(jax, "devices", lambda *_: DEVICES[:1])
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the folder of broken.py is added
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    Path("broken.py").write_text(BROKEN)
    Path("helper.py").write_text("def fails(x): return x + 'one'\n")
    Path("run.toml").write_text('data.corpus = "synthetic"')
    more = [f"--set={text}" for text in ("model.vocab=64", "eval.every=0", setting)]
    code = main([*typed("train", "run.toml", "--run", "run"), *more])
    said = capsys.readouterr().err
    error, place = RAISED[setting]
    key, _, name = setting.partition("=")
    last = said.splitlines()[-1]
    assert last.startswith(f"spmdtrain: {key}={name!r}: {error}") and code == ConfigError.exit_code
    assert place in last and "Traceback" in said and "/spmdtrain/running/" not in said
    if Path("run/events.jsonl").exists():
        end = json.loads(Path("run/events.jsonl").read_text().splitlines()[-1])
        assert end["exit_code"] == code and end["why"] == last.removeprefix("spmdtrain: ")


def typed(*words: str) -> list[str]:
    return [*words, *(word for text in SMALL for word in ("--set", text))]


@pytest.fixture
def here(workplace, monkeypatch) -> Path:
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(jax, "devices", lambda *_: DEVICES[:1])
    return workplace


def losses(run: str) -> list[float]:
    lines = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
    return [line.get("loss", line.get("eval_loss")) for line in lines]


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_the_example_equals_a_run_with_the_keywords_and_has_each_part():
    import own_parts as parts

    config = load("own_parts.toml", [*SMALL])
    bare = config.model_copy(update={"own": type(config.own)()})
    stopped = []
    st.run(
        bare,
        "by-keyword",
        optimizer=parts.lion,
        learning_rate=lambda step: parts.rise_and_fall(step, config),
        loss=lambda logits, targets: parts.focal(logits, targets, 1.0),
        data=parts.source(config),
        hooks=[lambda *given: stopped.append(given[:2])],
    )
    assert losses("run") == losses("by-keyword") and len(losses("run")) == 4
    rows = Path("run/losses.csv").read_text().splitlines()
    assert [row.split(";")[0] for row in rows] == ["1", "2", "3"]
    saved = json.loads(Path("run/config.json").read_text())
    assert saved["config"]["own"]["arguments"]["loss"] == {"gamma": 1.0}
    assert saved["origin"]["own.loss"] == "own_parts.toml"
    assert list(saved["model_code"]["own"]) == ["own_parts.py"]


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_a_run_directory_runs_no_code_by_itself(capsys):
    assert st.run_config("run").own == type(st.run_config("run").own)()
    for words in (["replay", "run", "--step", "3"], ["eval", "run"]):
        assert main(words) == ConfigError.exit_code
        said = capsys.readouterr().err
        assert "whose code runs only if you name it; try --own own_parts.py" in said
    assert main(["replay", "run", "--step", "3", "--own", "own_parts.py", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True
    assert main(["eval", "run", "--own", "own_parts.py", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(losses("run")[-1], rel=1e-6)


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_a_changed_file_is_named_when_the_run_is_resumed_and_by_diff(capsys):
    shutil.copytree("run", "other")
    text = Path("own_parts.py").read_text()
    Path("own_parts.py").write_text(text.replace("** gamma", "** gamma * 2"))
    more = [*typed("train", "own_parts.toml", "--run", "other"), "--set", "train.steps=4"]
    try:
        assert main(more) == 0
    finally:
        Path("own_parts.py").write_text(text)
    assert "the source of own_parts.py is not that of step 3 of other" in capsys.readouterr().out
    # As if all of it had been trained with the changed file.
    first, second = (json.loads(Path(f"other/starts/{n}.json").read_text()) for n in (1, 2))
    assert first["model_code"]["own"] != second["model_code"]["own"]
    Path("other/starts/1.json").write_text(json.dumps(first | {"model_code": second["model_code"]}))
    main(["diff", "run", "other", "--no-replay"])
    assert "code of the model" in capsys.readouterr().out


@pytest.mark.usefixtures("parts")
def test_a_certificate_keeps_the_parts_that_compute_and_no_others():
    config = named(
        *("own.optimizer=mine.py:rules", "own.arguments.optimizer.momentum=0.5"),
        *("own.data=mine.py:RATE", "own.sinks=mine.py:Sink", "own.arguments.sinks.mark=x"),
    )
    shrunk = shrink(config)
    assert shrunk.config.own.optimizer == "mine.py:rules"
    assert shrunk.config.own.arguments == {"optimizer": {"momentum": 0.5}}
    assert (shrunk.config.own.data, shrunk.config.own.sinks) == (None, ())
    assert any("own.data" in each for each in shrunk.lost)


@pytest.mark.usefixtures("parts")
def test_a_plan_counts_the_state_of_the_optimizer():
    def planned(*settings: str) -> int:
        return st.plan(named("model.vocab=64", *settings), 1, "h100")[0].memory.optimizer

    momentum = planned("own.optimizer=mine.py:maker")
    assert momentum == pytest.approx(planned("optimizer.name=sgd"), rel=0.02)
    assert momentum == pytest.approx(planned() / 2, rel=0.02)


@pytest.mark.usefixtures("parts")
def test_the_settings_are_written_as_toml_and_read_again():
    config = named("own.hooks=mine.py:watch", "own.arguments.hooks.mark=1")
    Path("written.toml").write_text(to_toml(config))
    assert load("written.toml").own == config.own
