"""The page of a run: its structure, its figures, and what it must never contain."""

import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.cli import main
from spmdtrain.config import CheckpointError, RunConfig, resolved
from spmdtrain.lab.page import tables
from spmdtrain.lab.page.columns import MetricsFile, smoothed, thinned
from spmdtrain.lab.page.page import page
from spmdtrain.lab.page.read import RunRead, RunReader
from spmdtrain.lab.page.troubles import troubles

VOID = {"meta", "path", "rect", "link", "br", "input"}
STEPS = 200
MOST_BYTES = 250_000
HOSTILE = '</script><script>alert(1)</script><img src="http://x.y/z" onerror=alert(1)>\x00\u202e'


class Tree(HTMLParser):
    """Fails on an element that is not closed; keeps attributes and texts."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []  # (the elements around, text)
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.words.append((" ".join(self.open), data))

    def ids(self) -> set[str]:
        return {attrs["id"] or "" for _, attrs in self.tags if "id" in attrs}

    def text(self) -> str:
        return " ".join(data for around, data in self.words if "script" not in around.split())


def metrics_of(steps: int) -> list[dict]:
    draw = np.random.default_rng(0)
    lines = []
    for step in range(1, steps + 1):
        lines.append(
            {
                "step": step,
                "time": 1000.0 + step,
                "loss": 2 + math.exp(-step / 50) + float(draw.normal()) * 0.05,
                "loss/web": 2.5,
                "grad_norm": 1 + float(draw.random()),
                "learning_rate": 1e-3,
                "tokens": 1024,
                "tokens_per_second": 10240.0,
                "step_seconds": 0.1 * (1 + step % 3),
                "mfu": None,
                "memory_bytes": None,
                "input_seconds": 0.0001,
            }
        )
        if step % 50 == 0:
            lines.append({"step": step, "time": 1000.0 + step, "eval_loss": 2 + 10 / step})
    return lines


EVENTS = [
    {"time": 900.0, "event": "launched", "step": 0, "argv": ["spmdtrain", "train"], "host": "h"},
    {"time": 920.0, "event": "started", "step": 0, "seconds": 10.0, "mesh": {"data": 2}},
    {"time": 980.0, "event": "compiled", "step": 0, "seconds": 60.0, "from_cache": False},
    {"time": 1001.0, "event": "first_step", "step": 1, "seconds": 1.0},
    {"time": 1050.0, "event": "evaluated", "step": 50, "seconds": 5.0, "eval_loss": 2.2},
    {"time": 1100.0, "event": "saving", "step": 100, "seconds": 2.0, "bytes": 1000},
    {"time": 1103.0, "event": "saved", "step": 100, "seconds": 2.0, "bytes": 1000},
    {"time": 1110.0, "event": "skipped", "step": 110, "samples": [0, 7]},
    {"time": 1200.0, "event": "finished", "step": STEPS, "seconds": 1.0},
    {"time": 1201.0, "event": "ended", "step": STEPS, "phase": "end", "exit_code": 0},
]
COMPILED = {
    "memory": {
        "argument_bytes": 4000,
        "output_bytes": 3000,
        "alias_bytes": 2500,
        "temp_bytes": 1000,
    },
    "traffic": [{"kind": "all-reduce", "axis": "data", "sent": 500.0, "sent_beside_work": 125.0}],
    "compile_seconds": 55.0,
}
PREDICTED = {
    "hardware": "h100",
    "step_seconds": 0.05,
    "breakdown_seconds": {"matmul": 0.03, "data_reduction": 0.02},
    "memory_bytes": {"parameters": 3000, "optimizer": 1200},
}


def lines_of(values: list[dict]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def write_run(directory: Path, **sections) -> Path:
    """A run of 200 steps as its files would tell of it."""
    directory.mkdir(parents=True)
    config = resolved(RunConfig(**sections))
    config["origin"]["train.steps"] = "--set"
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "metrics.jsonl").write_text(lines_of(metrics_of(STEPS)))
    (directory / "events.jsonl").write_text(lines_of(EVENTS))
    (directory / "compiled.json").write_text(json.dumps(COMPILED))
    (directory / "predicted.json").write_text(json.dumps(PREDICTED))
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    sections = {"train": {"steps": STEPS, "global_batch": 8, "microbatch": 2}}
    sections |= {"mesh": {"pipeline": 2, "data": 2}}
    return write_run(tmp_path_factory.mktemp("page") / "first", **sections)


def read(directory: Path) -> RunRead:
    return RunReader(directory).read()


def page_of(*directories: Path) -> str:
    return page([read(directory) for directory in directories])


def test_a_page_has_its_parts_and_every_element_is_closed(run):
    tree = Tree(page_of(run))
    parts = {"remarks", "curves", "time", "step", "memory", "network", "layout", "settings"}
    assert parts | {"checkpoints", "environment", "content"} <= tree.ids()
    assert {"loss", "norm", "rate", "speed", "sources", "step-times"} <= tree.ids()
    links = [attrs["href"] for tag, attrs in tree.tags if tag == "a"]
    assert links and {link.removeprefix("#") for link in links if link} <= tree.ids()
    pictures = [attrs for tag, attrs in tree.tags if tag == "svg"]
    assert all(each["role"] == "img" and each["aria-label"] for each in pictures)
    assert [attrs.get("lang") for tag, attrs in tree.tags if tag == "html"] == ["en"]
    assert sum(tag == "h1" for tag, _ in tree.tags) == 1


def test_a_page_refers_to_nothing_outside_itself(run):
    text = page_of(run)
    tree = Tree(text)
    for _, attrs in tree.tags:
        assert not {"src", "srcset", "action", "data", "xlink:href"} & attrs.keys()
        assert (attrs.get("href") or "#").startswith("#")
    assert not re.search(r"url\(|@import|https?:", text)
    [policy] = [a["content"] for t, a in tree.tags if a.get("http-equiv")]
    assert policy and policy.startswith("default-src 'none';") and "http" not in policy


def test_every_figure_of_the_head_is_that_of_the_files(run):
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "loss" in line]
    words = Tree(page_of(run)).text()
    loss = np.mean([line["loss"] for line in steps[-20:]])
    seconds = [line["step_seconds"] for line in steps[1:]]
    for title, value in {
        "training loss": f"{loss:.4g}",
        "held-out loss": f"{metrics[-1]['eval_loss']:.4g}",
        "tokens": f"{sum(line['tokens'] for line in steps) / 1e3:.3g} k",
        "step": f"{np.median(seconds) * 1e3:.3g} ms",
        # 20 s to start, 60 to compile, 21 for the first step, 5 + 2 beside, and 2 at the end
        "goodput": f"{(1201 - 900 - 20 - 60 - 21 - 5 - 2 - 2) / (1201 - 900):.0%}",
        "trouble": "1",
    }.items():
        assert re.search(rf"\b{title}\s+{re.escape(value)}(?!\S)", words), title
    assert f"step {STEPS} of {STEPS}" in words and "finished" in words
    assert "data 2" in words and "25%" in words  # of what is sent is hidden
    assert "train.steps" in words and "--set" in words


def test_tasks_of_an_evaluation_have_a_chart(run, tmp_path):
    """Without what the harness says about its own figures."""
    assert "Tasks" not in page_of(run)
    shutil.copytree(run, tmp_path / "run")
    figures = {"task/arc/acc": 0.25, "task/arc/acc_stderr": 0.125, "task/arc/sample_len": 8.0}
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": STEPS, "eval_loss": 2.0, **figures}) + "\n")
    written = page_of(tmp_path / "run")
    assert "arc/acc" in written
    assert "acc_stderr" not in written
    assert "sample_len" not in written


def test_only_what_somebody_chose_is_listed_as_chosen(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "run")
    config = json.loads((other / "config.json").read_text())
    config["origin"] |= {"model.ffn": "derived", "model.embed": "some.toml"}
    (other / "config.json").write_text(json.dumps(config))
    before, _, after = page_of(other).partition("What somebody chose")
    chosen = after.partition("<details>")[0]
    assert before and ">model.embed<" in chosen and ">model.ffn<" not in chosen


def test_collectives_are_listed_where_the_times_that_a_loop_runs_are_unknown(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "run")
    compiled = json.loads((other / "compiled.json").read_text())
    compiled.pop("traffic")
    row = {"kind": "all-to-all", "axis": "expert", "inside_loop": True, "count": 8, "bytes": 640}
    (other / "compiled.json").write_text(json.dumps(compiled | {"collectives": [row]}))
    words = Tree(page_of(other)).text()
    assert re.search(r"expert\s+all-to-all\s+8\s+640 B\s+a loop", words), words
    assert "depends on the data" in words


def test_a_command_to_type_names_the_code_of_the_run(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "a run")
    config = json.loads((other / "config.json").read_text())
    config["config"]["own"] = {"loss": "mine.py:focal", "data": "mine.py:sums", "sinks": ["x:y"]}
    (other / "config.json").write_text(json.dumps(config))
    typed = RunReader(other).read().command("explain", "--step 3")
    assert typed == f"spmdtrain explain '{other}' --step 3 --own mine.py"


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["/a/bin/spmdtrain", "train", "x.toml"], "/a/bin/spmdtrain train x.toml"),
        (["/a/spmdtrain/__main__.py", "train", "a b.toml"], "python -m spmdtrain train 'a b.toml'"),
        (["my_train.py"], "my_train.py"),
        ([], None),
    ],
)
def test_the_command_can_be_typed_again(argv, typed):
    assert tables._command(argv) == typed


def test_a_page_of_several_runs_names_what_differs(run, tmp_path):
    other = write_run(tmp_path / "second", optimizer={"name": "adamw", "learning_rate": 0.125})
    text = page_of(run, other)
    tree = Tree(text)
    words = tree.text()
    assert "What differs" in words and "0.125" in words
    assert "first: training" in words and "second: training" in words
    assert len(text.encode()) < MOST_BYTES


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.json", "compiled.json"])
def test_a_run_that_was_killed_at_any_byte_has_a_page(run, tmp_path, name):
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    whole = (run / name).read_bytes()
    cuts = np.linspace(0, len(whole), 14).astype(int)
    for cut in cuts:
        (broken / name).write_bytes(whole[:cut])
        Tree(page_of(broken))
    (broken / name).unlink()
    Tree(page_of(broken))


@pytest.mark.parametrize("kept", ["config.json", "events.jsonl", "metrics.jsonl"])
def test_one_file_is_enough_for_a_page_and_none_is_refused(run, tmp_path, kept):
    (tmp_path / kept).write_bytes((run / kept).read_bytes())
    Tree(page_of(tmp_path))
    (tmp_path / kept).unlink()
    with pytest.raises(CheckpointError, match="is not a run directory"):
        read(tmp_path)


def spoiled(value):
    """A document in which every text and every name is hostile."""
    if isinstance(value, dict):
        return {HOSTILE + str(name): spoiled(each) for name, each in value.items()}
    if isinstance(value, list):
        return [spoiled(each) for each in value]
    return HOSTILE if isinstance(value, str) or value is None else value


def test_hostile_texts_stay_texts(run, tmp_path):
    directory = tmp_path / "<b>run"
    shutil.copytree(run, directory)
    config = json.loads((run / "config.json").read_text())
    config["config"]["model"]["name"] = HOSTILE
    config["config"][HOSTILE] = {HOSTILE: HOSTILE}
    config["origin"] = dict.fromkeys(config["origin"], HOSTILE)
    (directory / "config.json").write_text(json.dumps(config))
    events = [event | {"why": HOSTILE, "host": HOSTILE, "phase": HOSTILE} for event in EVENTS]
    events[0] |= {"argv": [HOSTILE], "versions": {HOSTILE: HOSTILE}, "xla_flags": HOSTILE}
    events.insert(5, {"time": 1099.0, "event": HOSTILE, "step": 1})
    events[-1]["exit_code"] = 1
    (directory / "events.jsonl").write_text(lines_of(events))
    metrics = [line | {f"loss/{HOSTILE}": 1.0} for line in metrics_of(40)]
    (directory / "metrics.jsonl").write_text(lines_of(metrics))
    for name, document in (("compiled", COMPILED), ("predicted", PREDICTED)):
        changed = {key: spoiled(value) for key, value in document.items()}
        changed |= {"traffic": [{**each, "axis": HOSTILE} for each in COMPILED["traffic"]]}
        (directory / f"{name}.json").write_text(json.dumps(changed))
    text = page_of(directory)
    tree = Tree(text)
    assert "\x00" not in text and "\u202e" not in text
    tags = {tag for tag, _ in tree.tags}
    assert "img" not in tags and "b" in tags
    assert not any(name.startswith("on") for _, attrs in tree.tags for name in attrs)
    plain = Tree(page_of(run))
    scripts = sum(tag == "script" for tag, _ in plain.tags)
    assert sum(tag == "script" for tag, _ in tree.tags) == scripts


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
NAMES = st.sampled_from(
    ["time", "step", "event", "seconds", "mesh", "before", "loss", "step_seconds", "eval_loss"]
    + ["exit_code", "to_step", "grad_norm", "bytes", "argv", "versions", "devices", "learning_rate"]
)


@pytest.mark.core
@settings(max_examples=25)
@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=6), max_size=6), st.integers(0, 9))
@pytest.mark.seconds
def test_values_of_any_kind_have_a_page(tmp_path_factory, values, at):
    directory = tmp_path_factory.mktemp("odd")
    odd = [{**EVENTS[(at + n) % len(EVENTS)], **value} for n, value in enumerate(values)]
    (directory / "events.jsonl").write_text(lines_of([EVENTS[0], *odd, *EVENTS]))
    lines = metrics_of(3)
    odd = [{**lines[n % 3], **value} for n, value in enumerate(values)]
    (directory / "metrics.jsonl").write_text(lines_of([*lines, *odd]))
    for name in ("config", "compiled", "predicted", "summary"):
        document = {"config": {}, "memory": {}, **(values[0] if values else {})}
        (directory / f"{name}.json").write_text(json.dumps(document))
    Tree(page_of(directory))


def test_a_curve_that_is_thinned_keeps_its_spikes_and_its_mean():
    x = np.arange(10_000.0)
    y = np.sin(x / 100)
    y[7777] = 9.5
    few = thinned(x, y, 100)
    assert len(few.x) == 100 and few.highest is not None and few.lowest is not None
    assert few.highest.max() == 9.5 and few.lowest.min() == y.min()
    assert few.mean.mean() == pytest.approx(y.mean())
    assert np.isfinite(smoothed(np.array([1.0, math.nan, 3.0]), 2)).all()
    level = smoothed(np.full(50, 2.0), 20)
    assert level == pytest.approx(2.0), "a mean around does not lag, nor fade at the ends"


def test_lines_that_are_added_are_read_and_no_line_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = metrics_of(STEPS)
    file = MetricsFile(path)
    assert len(file.read().steps) == 0
    text = lines_of(lines).encode()
    for cut in (1000, 1001, 20_000, len(text)):
        path.write_bytes(text[:cut])
        file.read()
    again = MetricsFile(path).read()
    assert file.steps["loss"].tolist() == again.steps["loss"].tolist() and len(again.steps) == STEPS
    path.unlink()
    path.write_text(lines_of(lines[:10]))  # the run has gone back
    assert len(file.read().steps) == 10


@pytest.mark.seconds
def test_a_page_of_many_steps_is_small(run, tmp_path):
    long = tmp_path / "long"
    shutil.copytree(run, long)
    lines = metrics_of(20_000)
    lines += [{"step": 20_000, "eval_loss": 2.0} for _ in range(2000)]
    (long / "metrics.jsonl").write_text(lines_of(lines))
    more = [{**EVENTS[6], "step": n, "time": 1100.0 + n / 100} for n in range(5000)]
    (long / "events.jsonl").write_text(lines_of([*EVENTS[:6], *more, *EVENTS[7:]]))
    assert len(page_of(long).encode()) < MOST_BYTES
    assert len(page_of(*[long] * 6).encode()) < 2 * MOST_BYTES


@pytest.mark.slow
def test_a_page_of_a_million_steps_is_small(run, tmp_path):
    long = tmp_path / "long"
    shutil.copytree(run, long)
    line = metrics_of(1)[0]
    with (long / "metrics.jsonl").open("w") as file:
        for step in range(1, 1_000_001):
            file.write(json.dumps(line | {"step": step, "loss": 9.5 if step == 777_777 else 2.0}))
            file.write("\n")
    assert len(page_of(long).encode()) < MOST_BYTES
    assert "9.5" in page_of(long)


def test_the_state_is_said_in_a_word(run, tmp_path):
    there = tmp_path / "run"
    shutil.copytree(run, there)

    def said(events: list[dict], lock: str = "") -> str:
        (there / "events.jsonl").write_text(lines_of(events))
        (there / "lock").write_text(lock)
        found = re.search(r'<b class="(?:good|poor)">(.*?)</b>', page_of(there))
        assert found
        return found[1]

    ended = {"event": "ended", "step": 3, "time": 1300.0}
    assert said(EVENTS) == "finished"
    assert "killed" in said(EVENTS[:6])
    lock = json.dumps({"host": "elsewhere", "pid": 1, "start": 1})
    assert said(EVENTS[:6], lock) == "running"
    term = [*EVENTS[:2], ended | {"exit_code": 143, "phase": "compile"}]
    assert said(term) == "ended by a signal with exit code 143 in compile"
    wrong = [*EVENTS[:2], ended | {"exit_code": 4, "phase": "restore", "why": "no <mesh>"}]
    assert said(wrong) == "ended with exit code 4 in restore: no &lt;mesh&gt;"
    preempted = EVENTS[8] | {"event": "preempted"}
    assert said([*EVENTS[:6], preempted, ended | {"exit_code": 3}]).startswith(
        "stopped by a signal"
    )


LAUNCHED = {"event": "launched", "step": 100, "time": 1300.0, "before": {"step": 117}}
ENDED = {"event": "ended", "step": 3, "time": 1400.0}
DIVERGED = {"event": "diverged", "step": 9, "time": 1350.0}
# what happened after the first events -> the troubles that the page counts, with their steps
TROUBLES = {
    "killed": ([], [("lost", 100)]),
    "killed, then finished": ([LAUNCHED, EVENTS[8], EVENTS[9]], [("lost", 117)]),
    "killed three times": ([LAUNCHED, LAUNCHED], [("lost", 117), ("lost", 117), ("lost", 100)]),
    "another process was lost": ([ENDED | {"exit_code": 8}], [("ended", 3)]),
    "a second signal": ([ENDED | {"exit_code": 130}], [("ended", 3)]),
    "diverged": ([DIVERGED, ENDED | {"exit_code": 9}], [("diverged", 9)]),
    "preempted, then finished": ([ENDED | {"exit_code": 3}, LAUNCHED, EVENTS[9]], []),
    "finished": ([EVENTS[8], EVENTS[9]], []),
}


@pytest.mark.parametrize("after", TROUBLES)
def test_an_attempt_that_did_not_end_in_order_is_trouble(run, tmp_path, after):
    """Whether or not the process could still say so; a failure that was reported counts once."""
    there = tmp_path / "run"
    shutil.copytree(run, there)
    events, wanted = TROUBLES[after]
    (there / "events.jsonl").write_text(lines_of([*EVENTS[:7], *events]))
    found = troubles(RunReader(there).read())
    assert [(event["event"], event["step"]) for event in found] == wanted
    words = " ".join(Tree(page_of(there)).text().split())
    assert f"trouble {len(wanted) or 'none'} " in words
    assert ("as a killed process does" in words) == ("killed" in after)
    (there / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "start": 1}))
    alive = troubles(RunReader(there).read())
    is_newest_lost = bool(found) and "killed" in after and after != "killed, then finished"
    assert len(alive) == len(found) - is_newest_lost, "one that lives is not lost"


def test_the_end_of_a_mean_is_as_calm_as_its_middle():
    """And no single step decides where the thick line ends."""
    noise = np.random.default_rng(0).normal(size=(200, 300))
    ends = np.array([smoothed(row, 20) for row in noise])
    assert ends[:, -10:].std(0).max() < 1.7 * ends[:, 150].std(), "11 values beside 21"
    falling = np.array([100.0, 50.0, 25.0, *np.full(40, 20.0)])
    assert smoothed(falling, 20)[0] == 100, "a steep start is not drawn lower"


def test_a_dot_at_the_edge_of_a_chart_is_whole():
    """What may stand out from the plot is at least half of the widest dot."""
    css = resources.files("spmdtrain.lab.page").joinpath("page.css").read_text()
    [plot] = re.findall(r"\.plot>svg\{(.*?)\}", css)
    [beyond] = re.findall(r"overflow:visible;clip-path:inset\(-(\d+)px\)", plot)
    widths = re.findall(r"stroke-width:([\d.]+);stroke-linecap:round", css)
    assert len(widths) == 2 and float(beyond) >= max(map(float, widths)) / 2


def test_the_command_writes_the_page_and_prints_the_figures(run, tmp_path, capsys):
    out = tmp_path / "both.html"
    assert main(["report", str(run), str(run), "--out", str(out)]) == 0
    assert f"{out}: 200 and 200 steps, " in capsys.readouterr().out
    Tree(out.read_text())
    assert main(["report", str(run), "--follow"]) == 0, "it is over, and written once"
    assert (run / "report.html").is_file()
    capsys.readouterr()
    assert main(["report", str(run), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["step"] == STEPS and found["state"] == "finished" and found["trouble"] == 1
    assert main(["report", str(tmp_path / "nothing")]) == 6
    assert main(["report", *[str(run)] * 7]) == 4
    assert main(["report", str(run), "--json", "--follow"]) == 4
    assert main(["report", str(run), "--out", str(tmp_path / "no" / "page.html")]) == 10
    assert all(line.startswith("spmdtrain: ") for line in capsys.readouterr().err.splitlines())


def test_a_page_is_made_without_jax():
    code = (
        "import sys, spmdtrain.lab.page.page, spmdtrain.lab.page.read; print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
