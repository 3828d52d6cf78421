"""The bill of each feature: the files of the library that name it, except its own. It only falls.

Whoever changes a feature or takes it out has to read these files. So a file that names a feature
for the first time is an error here: what it says belongs to the feature's own folder, and reaches
the rest through a table, an item of the state, a hook or a function without the feature's name.
What two features do not go with, one of them has to say: the refusals of a section are on no bill.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "spmdtrain"
LIST = Path("train/all_parts.py")  # names each feature of the step once: it is on no bill
# A file of each lineage of published models, with the settings that they need: on no bill either.
OF_FAMILIES = (Path("config/published/families"), Path("interop/names"))


@dataclass(frozen=True)
class Feature:
    """`words`: a pattern of what it is called, in code and texts, whatever the case. `homes`: its
    own folders and files. `bill`: the number of other files with one of the words.
    """

    words: str
    homes: tuple[str, ...]
    bill: int


FEATURES = {
    "adapters": Feature(
        r"adapter|\blora|\bdora",
        ("models/adapters", "config/schema/finetune.py", "interop/peft"),
        22,
    ),
    "certify": Feature(r"certif", ("lab/certify", "cli/run/certify.py"), 7),
    "chats": Feature(r"\bchat", ("data/chats",), 21),
    "compression": Feature(
        # Not of files: documents, checkpoints and bundles are compressed as well.
        r"feedback|codec|CompressionConfig|parallel.compress|compressed gradients|compression\.",
        (
            "config/schema/compression.py",
            "parallel/compress.py",
            "parallel/feedback",
            "train/compression",
        ),
        9,
    ),
    "delayed scaling": Feature(
        r"delayed|scaling_history|train\.scaling",
        (
            "config/schema/precision.py",
            "models/layers/delayed_weight.py",
            "parallel/matmuls/delayed.py",
            "train/scaling",
        ),
        2,
    ),
    "distillation": Feature(
        r"distil|teach|taught|saved_logits",
        (
            "cli/data/teach.py",
            "config/published/teacher.py",
            "config/schema/distill.py",
            "data/saved_logits",
            "running/distillation",
            "train/distillation",
        ),
        7,
    ),
    "ema": Feature(r"\bema\b", ("train/items/ema.py",), 20),
    "experts": Feature(
        r"expert",
        (
            "config/schema/model/experts.py",
            "models/layers/expert_mlp.py",
            "models/layers/router.py",
            "parallel/experts",
            "planner/cost/experts.py",
            "train/updates/router_load.py",
        ),
        64,
    ),
    "float8": Feature(r"float8|mxfp8|\bfp8", ("models/layers/narrow.py", "parallel/matmuls"), 8),
    "guards": Feature(r"guard", ("config/schema/guard.py", "running/guards"), 30),
    "islands": Feature(
        r"island", ("config/schema/islands.py", "running/islands", "train/islands"), 3
    ),
    "latent attention": Feature(
        r"latent",
        (
            "config/schema/model/latent.py",
            "models/layers/attention/latent.py",
            "models/layers/attention/indexers.py",
        ),
        17,
    ),
    "loss scale": Feature(r"loss_?scale", ("train/items/loss_scale.py",), 5),
    "multi token": Feature(
        r"multi_?token",
        (
            "config/schema/model/multi_token.py",
            "models/layers/multi_token.py",
            "train/gradients/further_losses.py",
        ),
        10,
    ),
    "muP": Feature(r"\bmup|width_rule", ("config/schema/model/mup.py",), 14),
    "page": Feature(r"spmdtrain\.lab\.page", ("lab/page",), 4),
    "preference": Feature(
        r"preference|pair_loss|learns_pairs|\bdpo\b",
        ("train/gradients/pair_head.py", "train/gradients/pair_loss.py"),
        9,
    ),
    "profile": Feature(r"spmdtrain\.lab\.profile", ("lab/profile",), 1),
    "record": Feature(
        r"running\.record|steps\.jsonl|log\.record|fingerprint", ("running/record",), 47
    ),
    "replay": Feature(r"replay", ("lab/replay", "cli/record/replay.py"), 26),
    "ring attention": Feature(r"\bring\b|ulysses|zigzag", ("parallel/context",), 31),
    "snapshots": Feature(
        r"snapshot",
        ("checkpoints/snapshots", "processes/snapshots", "running/start/open_snapshots.py"),
        16,
    ),
    "soap": Feature(r"\bsoap", ("train/updates/transformations/soap.py",), 5),
    "sparsity": Feature(
        r"spars(?!e_moe|e_step|e attention)",
        ("config/schema/sparsity.py", "train/sparsity"),
        2,
    ),
    "spikes": Feature(r"spike", ("train/items/spikes.py",), 7),
    "stages": Feature(
        r"train\.stages|BatchStage|TimedStage|in_stage|stage_of|frozen_layers",
        ("config/stage_timetable.py", "train/stages.py"),
        26,
    ),
    "streams": Feature(r"is_streamed|data\.streams|jsonl.*parquet", ("data/streams",), 7),
}


def files_that_name(feature: Feature, library: Path) -> list[str]:
    """The files with one of its words, except its own: paths in the library, sorted."""
    words = re.compile(feature.words, re.IGNORECASE)
    files = (path.relative_to(library) for path in sorted(library.rglob("*.py")))
    homes = [Path(home) for home in feature.homes]
    return [
        str(file)
        for file in files
        if file != LIST
        and not any(folder in file.parents for folder in OF_FAMILIES)
        and not any(home in (file, *file.parents) for home in homes)
        and words.search(without_refusals(library / file))
    ]


def without_refusals(path: Path) -> str:
    """The text of a file, without the refusals if it is that of a section of settings."""
    text = path.read_text(encoding="utf-8")
    if path.parent.name != "schema":
        return text
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("refusals"):
            for at in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[at] = ""
    return "\n".join(lines)


@pytest.mark.parametrize("name", FEATURES)
def test_no_further_file_names_a_feature(name):
    files = files_that_name(FEATURES[name], ROOT)
    bill = FEATURES[name].bill
    assert len(files) <= bill, f"move what names {name} to its own files; it is in {files}"
    assert len(files) == bill, f"fewer than before: write {len(files)} as the bill of {name}"


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_has_its_homes(name):
    assert [home for home in FEATURES[name].homes if not (ROOT / home).exists()] == []


def test_files_that_name_a_feature_are_found(tmp_path):
    for file, text in {
        "soap/soap.py": "class Soap: ...",
        "soap/basis.py": "def basis(): ...",
        "soapy.py": "import soapy",
        "step.py": '"""Not of SOAP alone."""',
        "loop.py": "def loop(): ...",
    }.items():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    soap = Feature(r"\bsoap\b", ("soap",), 1)
    assert files_that_name(soap, tmp_path) == ["step.py"]


# The files of README's tour, in its order, with the features that each still names. A reader of the
# core has to know these first: a feature may be taken out here, and none added.
TOUR = {
    "cli/run/train.py": {"guards", "snapshots"},
    "config/load.py": {"adapters"},
    "running/loop.py": set(),
    "train/shard.py": set(),
    "train/step.py": {"spikes"},
    "train/gradients/grad_accumulation.py": set(),
    "parallel/reduce.py": {"compression"},
    "train/updates/optimizers.py": {"experts"},
    "running/watch.py": {"guards", "snapshots", "stages"},
    "checkpoints/checkpoints.py": {"ema", "record"},
}


def test_the_tour_of_the_readme_is_that_of_these_files():
    tour = (ROOT.parent / "README.md").read_text(encoding="utf-8").partition("guided tour")[2]
    assert re.findall(r"^\d+\. `spmdtrain/([^`]+)`", tour, re.M) == list(TOUR)


@pytest.mark.parametrize("path", TOUR)
def test_a_file_of_the_tour_names_no_further_feature(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    named = {
        name
        for name, feature in FEATURES.items()
        if not any(Path(home) in (Path(path), *Path(path).parents) for home in feature.homes)
        and re.search(feature.words, text, re.IGNORECASE)
    }
    assert named <= TOUR[path], f"the core names {named - TOUR[path]}; move that to the feature"
    assert named == TOUR[path], f"fewer than before: take {TOUR[path] - named} out of TOUR"
