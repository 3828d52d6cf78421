"""`model.make` and [model.extra]: a model of one's own from the command line, and code that runs
only if asked.
"""

import json
import shutil
from pathlib import Path

import jax
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.config import ConfigError, to_toml
from spmdtrain.config.named_code import import_named
from spmdtrain.models.choose import choose_model
from spmdtrain.planner.cost.flops import model_flops_per_token

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "model.layers=4",
    "model.embed=16",
    "model.heads=2",
    "model.extra.every=2",
    "model.extra.state=8",
    "train.sequence_length=8",
    "train.global_batch=8",
    "train.steps=3",
    "data.corpus=stdlib",
)
# tests/train/test_own_model.py has blocks of two kinds on every mesh.
ONE = ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1")
DEVICES = jax.devices()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the example, and a run of it by the command line."""
    folder = tmp_path_factory.mktemp("own")
    for file in ("hybrid.py", "hybrid.toml"):
        shutil.copy(EXAMPLES / file, folder)
    text = (folder / "hybrid.toml").read_text().replace("examples/hybrid.py", "hybrid.py")
    (folder / "hybrid.toml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(jax, "devices", lambda *_: DEVICES[:1])
        assert train("run", *ONE) == 0
    return folder


@pytest.fixture
def here(workplace, monkeypatch) -> Path:
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(jax, "devices", lambda *_: DEVICES[:1])
    return workplace


def train(run: str, *more: str) -> int:
    settings = [word for text in (*SMALL, *more) for word in ("--set", text)]
    return main(["train", "hybrid.toml", "--run", run, *settings])


@pytest.mark.long
def test_it_trains_resumes_and_is_recorded_with_all_of_its_settings(here, capsys):
    del here
    saved = json.loads(Path("run/config.json").read_text())
    assert saved["config"]["model"]["make"] == "hybrid.py:Hybrid"
    assert saved["config"]["model"]["extra"] == {"every": 2, "state": 8, "remember": 2.0}
    assert saved["origin"]["model.extra.state"] == "--set"
    assert saved["model_code"]["class"] == "hybrid.Hybrid"
    assert {"hybrid.Hybrid", "hybrid.Recurrence"} <= set(saved["model_code"]["sources"])
    assert train("run", *ONE, "train.steps=4") == 0
    assert "Hybrid: " in capsys.readouterr().out
    assert train("run", *ONE, "train.steps=5", "model.extra.remember=1.5") == 6
    assert "model.extra.remember has changed; asked 1.5; found 2.0" in capsys.readouterr().err


@pytest.mark.seconds
def test_a_run_directory_runs_no_code_by_itself(here, capsys):
    asked = ["sample", "run", "--prompt", "def ", "--length", "12", "--temperature", "0"]
    assert main(asked) == ConfigError.exit_code
    said = (
        "run uses the model hybrid.py:Hybrid, whose code runs only if you name it; "
        "try --make hybrid.py:Hybrid"
    )
    assert said in capsys.readouterr().err
    assert st.run_config(here / "run").model.make is None
    assert main([*asked, "--make", "hybrid.py:Hybrid"]) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    assert text.startswith("def ") and len(text) == 16


@pytest.mark.seconds
def test_text_made_anew_from_the_window_is_what_the_logits_say(here):
    """More tokens than the model has positions for: the last ones are in sight."""
    del here
    ids = st.generate("run", [5, 6, 7], 12, choice=st.Choice(0), make="hybrid.py:Hybrid")
    setup = st.shard(st.run_config("run"), "hybrid.py:Hybrid")
    logits = st.make_logits(setup)
    params = st.restore("run", setup).params
    for at in range(3, 15):
        seen = ids[max(0, at - 8) : at]
        assert int(logits(params, seen[None])[0, -1].argmax()) == ids[at]


@pytest.mark.seconds
def test_show_and_estimate_take_it_too(here, capsys):
    del here
    settings = [word for text in (*SMALL, *ONE) for word in ("--set", text)]
    assert main(["show", "hybrid.toml", *settings]) == 0
    printed = capsys.readouterr().out
    assert "remember = 2.0  # default" in printed
    assert "blocks.layer.block.0.attention.in_e3s" in printed
    assert main(["estimate", "hybrid.toml", "--hardware", "h100", *settings]) == 0
    assert (
        "hybrid.py:Hybrid: parameters, gradients, optimizer state and FLOPs are its own;"
        in capsys.readouterr().out
    )
    flops = {}
    for state in (8, 64):
        config = st.load("hybrid.toml", [*SMALL, *ONE, f"model.extra.state={state}"]).with_vocab(
            256
        )
        found = st.estimate(config, 1, "h100")
        flops[state] = model_flops_per_token(found.workload.model, 8)
    wider = 6 * 2 * 4 * 16 * (64 - 8)  # two recurrences, each with four matrices of embed x state
    assert flops[64] - flops[8] == pytest.approx(wider, rel=0.02)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("nothing.py:Model", r"nothing.py: No such file or directory; found .*hybrid.py"),
        ("hybrid.py", r"model.make='hybrid.py'; try FILE.py:CLASS"),
        ("hybrid.py:Hibrid", r"hybrid.py has no class Hibrid; found Settings, Recurrence, Hybrid"),
        ("no_such_package.module:Model", "ModuleNotFoundError: No module named 'no_such_package'"),
        (
            "broken.py:Model",
            r"broken.py:Model': NameError: name 'undefined' is not defined \(.*broken.py, line 2\)",
        ),
        ("syntax.py:Model", r"SyntaxError: .* \(syntax.py, line 1\)"),
        ("json.py:Model", "a module json is already loaded"),
    ],
)
def test_a_name_that_leads_to_no_model_is_one_line(here, make, said):
    (here / "broken.py").write_text("x = 1\nundefined\n")
    (here / "syntax.py").write_text("class :\n")
    (here / "json.py").write_text("")
    with pytest.raises(ConfigError, match=said) as refused:
        import_named(make, "model.make")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ("model.extra.stat=8",),
            r"unknown key model.extra.stat \(from --set\), did you mean model.extra.state\?",
        ),
        (
            ("model.extra.state=many",),
            r"model.extra.state='many' \(from --set\) must be an integer",
        ),
        (("model.extra.state=[1]",), r"model.extra.state=\[1\] \(from --set\) must be an integer"),
    ],
)
def test_a_setting_of_its_own_is_typed_by_its_class(here, settings, said):
    del here
    with pytest.raises(ConfigError, match=said):
        choose_model(tiny(*settings), "hybrid.py:Hybrid")


def test_the_shipped_model_has_no_settings_of_ones_own():
    with pytest.raises(
        ConfigError,
        match=r"Transformer reads no settings from \[model.extra\]; found model.extra.state",
    ):
        choose_model(tiny("model.extra.state=8"))


def test_a_file_that_has_changed_is_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        Path("changing_model.py").write_text(f"class Model:\n    number = {number}\n")
        assert import_named("changing_model.py:Model", "model.make").number == number


def test_free_settings_survive_toml(tmp_path):
    settings = (
        "model.extra.a=1.5",
        "model.extra.b.c=text",
        "model.extra.d=[1, 2]",
        'model.extra.e={f = "g"}',
    )
    config = tiny(*settings)
    assert config.model.extra == {"a": 1.5, "b": {"c": "text"}, "d": [1, 2], "e": {"f": "g"}}
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert st.load(tmp_path / "again.toml").model.extra == config.model.extra
