"""The house of DESIGN.md, section 2: imports go down, never up or round; no jax in the config room;
no drawers.
"""

import ast
import re
import symtable
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first. A room may import what lies on lower floors and itself, not its neighbours. A file
# without a room is an error: find it one.
FLOORS = [
    ["pallas_kernels"],
    ["spmdtrain"],  # its __init__.py alone: the version
    ["spmdtrain.config"],
    ["spmdtrain.processes"],
    ["spmdtrain.parallel", "spmdtrain.compiled"],
    ["spmdtrain.pipeline"],
    ["spmdtrain.models", "spmdtrain.data"],
    ["spmdtrain.train"],
    ["spmdtrain.checkpoints", "spmdtrain.interop", "spmdtrain.lab.page"],
    ["spmdtrain.inference"],
    [
        "spmdtrain.running",
        "spmdtrain.show",
        "spmdtrain.planner",
        "spmdtrain.launch",
    ],
    ["spmdtrain.lab.replay", "spmdtrain.lab.certify"],
    ["spmdtrain.lab", "spmdtrain.lab.diff", "spmdtrain.lab.profile", "spmdtrain.lab.strategies"],
    ["spmdtrain.cli"],
    ["spmdtrain.__main__"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
HOUSES = {room.partition(".")[0] for room in FLOOR}

# The config room answers --help and typos in milliseconds.
IMPORT_JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "pallas_kernels"}
DRAWERS = {"util", "utils", "common", "misc", "base", "helper", "helpers"}


def room_of(module: str) -> str:
    """The longest prefix of a dotted name that is a room; names straight in `spmdtrain` live in
    "spmdtrain".
    """
    parts = module.split(".")
    return next(
        room for end in range(len(parts), 0, -1) if (room := ".".join(parts[:end])) in FLOOR
    )


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions too; `from a import b` gives
    "a.b".
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def violations(root: Path) -> list[str]:
    found = []
    for path in sorted(file for house in HOUSES for file in (root / house).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = module_of(path.relative_to(root))
        package = ".".join(parts[:-1])
        room = room_of(module)
        if room == "spmdtrain" and module != "spmdtrain":
            found.append(f"{path.relative_to(root)}: has no floor in FLOORS")
        if drawers := DRAWERS.intersection(parts):
            found.append(f"{path.relative_to(root)}: {drawers.pop()} is a drawer, not a room")
        for line, name in imported(ast.parse(path.read_text(), str(path)), package):
            if complaint := complain(module, room, name):
                found.append(f"{path.relative_to(root)}:{line}: {complaint}")
    return found


def module_of(path: Path) -> str:
    """The dotted name of a file, relative to the root; a package's `__init__.py` has the package's
    name.
    """
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(root: Path, house: str) -> list[list[str]]:
    """The files of `house` that import each other in a circle, imports inside functions counted;
    sorted, one list per circle. `from a.b import c` needs a.b.c where that is a file, else a.b.
    """
    files = {
        module_of(path.relative_to(root)): path for path in sorted((root / house).rglob("*.py"))
    }
    needs = {}
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = [name for _, name in imported(ast.parse(path.read_text(), str(path)), package)]
        needs[module] = {
            name if name in files else name.rpartition(".")[0] for name in names
        } & files.keys()
    reached = {module: set(first) for module, first in needs.items()}
    for through in files:  # Warshall's transitive closure
        for module in files:
            if through in reached[module]:
                reached[module] |= reached[through]
    found = {tuple(sorted(a for a in files if a in reached[b] and b in reached[a])) for b in files}
    return [list(circle) for circle in sorted(found) if circle]


def complain(module: str, room: str, name: str) -> str:
    """Why `module` in `room` may not import `name`; empty where it may."""
    top = name.partition(".")[0]
    if top in HOUSES and (there := room_of(name)) != room and FLOOR[there] >= FLOOR[room]:
        return (
            f"{room} (floor {FLOOR[room]}) imports {name} (floor {FLOOR[there]}): "
            "imports only go down"
        )
    if room == "spmdtrain.config" and top in IMPORT_JAX:
        return f"{name}: the config room stays free of jax"
    if top == "orbax" and module != "spmdtrain.checkpoints.store":
        return f"{name}: only spmdtrain/checkpoints/store.py knows orbax"
    return ""


def test_imports_only_go_down_and_no_room_is_a_drawer():
    assert violations(ROOT) == []


@pytest.mark.parametrize("house", sorted(HOUSES))
def test_no_file_imports_itself_in_a_circle(house):
    assert circles(ROOT, house) == []


def test_a_planted_circle_is_found(tmp_path):
    room = tmp_path / "pallas_kernels" / "norm"
    room.mkdir(parents=True)
    (room / "__init__.py").write_text("from pallas_kernels.norm.api import f")
    (room / "api.py").write_text("from pallas_kernels.norm import kernel")
    (room / "kernel.py").write_text("from pallas_kernels.norm.rows import block")
    (room / "rows.py").write_text("def f():\n    from pallas_kernels.norm import kernel")
    (room / "alone.py").write_text("from .kernel import g")
    assert circles(tmp_path, "pallas_kernels") == [
        ["pallas_kernels.norm.kernel", "pallas_kernels.norm.rows"]
    ]


def test_every_python_file_of_the_house_is_read():
    assert (ROOT / "spmdtrain" / "config" / "schema" / "run.py").exists()
    assert room_of("spmdtrain.config.schema.run") == "spmdtrain.config"
    assert room_of("spmdtrain.configuration") == "spmdtrain"


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("spmdtrain/parallel/mesh.py", "from spmdtrain.models import size", "imports only go down"),
        ("spmdtrain/parallel/mesh.py", "from spmdtrain import train", "imports only go down"),
        (
            "spmdtrain/parallel/mesh.py",
            "def f():\n    import spmdtrain.train.step",
            "imports only go down",
        ),
        ("spmdtrain/parallel/mesh.py", "from ..train import step", "imports only go down"),
        ("spmdtrain/parallel/__init__.py", "from ..cli import main", "imports only go down"),
        (
            "spmdtrain/models/gpt.py",
            "from spmdtrain.data.corpus import read",
            "imports only go down",
        ),
        (
            "spmdtrain/running/loop.py",
            "from spmdtrain.planner import memory",
            "imports only go down",
        ),
        ("spmdtrain/__init__.py", "from spmdtrain.config import load", "imports only go down"),
        ("pallas_kernels/choose.py", "import spmdtrain", "imports only go down"),
        ("spmdtrain/config/load.py", "def f():\n    import jax.numpy as jnp", "free of jax"),
        ("spmdtrain/config/load.py", "from flax import nnx", "free of jax"),
        (
            "spmdtrain/running/loop.py",
            "from orbax import checkpoint",
            "only spmdtrain/checkpoints/store.py",
        ),
        ("spmdtrain/train/utils.py", "", "drawer"),
        ("spmdtrain/common/names.py", "", "drawer"),
        ("spmdtrain/trainer.py", "", "no floor"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, source, complaint):
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source)
    assert any(complaint in line for line in violations(tmp_path))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "spmdtrain/train/step.py",
            "from spmdtrain.models import size\nfrom . import loss\nfrom ..parallel import mesh",
        ),
        ("spmdtrain/checkpoints/store.py", "import orbax.checkpoint"),
        (
            "spmdtrain/cli.py",
            "from spmdtrain import __version__\nfrom spmdtrain.config import load",
        ),
        ("pallas_kernels/norm/api.py", "import jax\nfrom pallas_kernels.choose import choose"),
    ],
)
def test_a_lawful_import_is_left_alone(tmp_path, file, source):
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source)
    assert violations(tmp_path) == []


# --- what is imported is there --------------------------------------------------------------------

# Imports of tests, benchmarks and pages, and those inside functions, fail only when they are run.
IMPORTING = (*sorted(HOUSES), "benchmarks", "docs", "examples", "tests")


def file_of(root: Path, module: str) -> Path | None:
    path = root / module.replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.exists()), None)


@cache
def names_of(root: Path, module: str) -> set[str] | None:
    """What can be imported from a module; None where only running it would tell."""
    file = file_of(root, module)
    if not file:
        return set()
    source = file.read_text(encoding="utf-8")
    symbols = symtable.symtable(source, str(file), "exec").get_symbols()
    names = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    if "__getattr__" in names or "import *" in source:
        return None
    beside = {path.stem for path in file.parent.iterdir()} if file.name == "__init__.py" else set()
    return names | beside


def dangling_imports(root: Path) -> list[str]:
    dangling = []
    for path in sorted(file for top in IMPORTING for file in (root / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                module, wanted = node.module or "", {alias.name for alias in node.names} - {"*"}
            elif isinstance(node, ast.Import):
                module, wanted = node.names[0].name, set()
            else:
                continue
            if module.partition(".")[0] not in HOUSES:
                continue
            names = names_of(root, module)
            missing = wanted - names if names is not None else set()
            if missing or not file_of(root, module):
                dangling.append(
                    f"{path.relative_to(root)}:{node.lineno}: {module} {sorted(missing)}"
                )
    return dangling


def test_what_is_imported_is_there():
    assert dangling_imports(ROOT) == []


def test_an_import_of_what_was_renamed_is_found(tmp_path):
    for name in ("spmdtrain/__init__.py", "spmdtrain/mesh.py", "tests/test_mesh.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("class Mesh:\n    size = 1\n")
    lines = {
        "from spmdtrain import mesh": True,
        "from spmdtrain.mesh import Mesh": True,
        "import spmdtrain.mesh": True,
        "from spmdtrain import grid": False,
        "from spmdtrain.mesh import size": False,
        "def f():\n    from spmdtrain.mesh import Grid": False,
        "import spmdtrain.grid": False,
    }
    for line, is_there in lines.items():
        (tmp_path / "tests" / "test_mesh.py").write_text(line)
        assert (dangling_imports(tmp_path) == []) == is_there, line


def test_text_files_are_utf_8_whatever_the_locale():
    """A file that is opened as text names its encoding, or is read in the one of the machine."""
    found = []
    for house in HOUSES:
        for path in (ROOT / house).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _opens_text_without_encoding(node):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def _opens_text_without_encoding(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if any(each.arg == "encoding" for each in call.keywords) or owner in ("os", "tarfile"):
        return False
    if name in ("read_text", "write_text"):
        return not (name == "read_text" and call.args)  # read_text("utf-8")
    if name not in ("open", "fdopen"):
        return False
    texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
    texts += [each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)]
    return not any(
        isinstance(mode, str) and set(mode) <= set("rwxab+") and "b" in mode for mode in texts
    )


def test_no_two_files_of_tests_share_a_name():
    """pytest imports them by their bare names: the second of two would not run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


# --- a name of its own, and company ---------------------------------------------------------------

# A command and a section of the settings have the name that a person types.
TYPED = ("spmdtrain/cli", "spmdtrain/config/schema")
# Names that several files still share. The list may only shrink: a line of a traceback, a tab of an
# editor and a search for a file show no more than its name.
SHARED_NAMES = {
    "stages.py",
}

# Folders of fewer than three files, and why each is one.
SMALL_FOLDERS = {
    "spmdtrain": "the package itself: what is run with python -m",
    "spmdtrain/lab": "rooms alone",
    "spmdtrain/checkpoints/snapshots": "a floor of their own: the memory of a host, not a store",
    "spmdtrain/data/mixtures": "[data.mix], with [data.phases]",
    "spmdtrain/planner/settings": "what the schema accepts, apart from what it costs",
    "spmdtrain/processes/snapshots": "slots that a launcher owns: without jax, unlike the others",
    "spmdtrain/running/distillation": "the running half of [distill]",
    "spmdtrain/train/compared": "compares runs, and no step imports it",
    "spmdtrain/train/scaling": "the training half of delayed scaling",
}


def modules_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]


def shared_names(root: Path) -> dict[str, list[str]]:
    """File name -> the modules of the library that share it; not what a person types."""
    homes: dict[str, list[str]] = {}
    for folder in folders_of(root):
        if not any(folder.is_relative_to(root / typed) for typed in TYPED):
            for path in modules_in(folder):
                homes.setdefault(path.name, []).append(str(path.relative_to(root)))
    return {name: files for name, files in homes.items() if len(files) > 1}


def folders_of(root: Path) -> list[Path]:
    return sorted({path.parent for path in (root / "spmdtrain").rglob("*.py")})


def small_folders(root: Path) -> set[str]:
    """The folders with one module or two."""
    return {
        str(folder.relative_to(root)) for folder in folders_of(root) if len(modules_in(folder)) < 3
    }


def test_no_two_modules_share_a_file_name():
    shared = shared_names(ROOT)
    assert {name: files for name, files in shared.items() if name not in SHARED_NAMES} == {}
    assert SHARED_NAMES - shared.keys() == set(), "no longer shared: take it off the list"


def test_a_folder_below_three_files_has_a_reason():
    small = small_folders(ROOT)
    assert small - SMALL_FOLDERS.keys() == set(), "put the files next to what uses them"
    assert SMALL_FOLDERS.keys() - small == set(), "no longer small: take it off the list"


def test_a_shared_name_and_a_small_folder_are_found(tmp_path):
    for name in ("data/a.py", "data/b.py", "data/c.py", "models/b.py", "cli/b.py"):
        path = tmp_path / "spmdtrain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert shared_names(tmp_path) == {"b.py": ["spmdtrain/data/b.py", "spmdtrain/models/b.py"]}
    assert small_folders(tmp_path) == {"spmdtrain/models", "spmdtrain/cli"}


# --- one home -------------------------------------------------------------------------------------


def sources(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of everything in spmdtrain/."""
    files = sorted((root / "spmdtrain").rglob("*.py"))
    return {module_of(path.relative_to(root)): path for path in files}


def class_names_used_twice(root: Path) -> list[str]:
    homes: dict[str, list[str]] = {}
    for module, path in sources(root).items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    return [f"class {name} is in {modules}" for name, modules in homes.items() if len(modules) > 1]


def test_a_class_name_has_one_home():
    assert class_names_used_twice(ROOT) == []


def test_a_class_name_with_two_homes_is_found(tmp_path):
    for name in ("data/a.py", "models/b.py"):
        path = tmp_path / "spmdtrain" / name
        path.parent.mkdir(parents=True)
        path.write_text("class A: ...")
    assert class_names_used_twice(tmp_path) == [
        "class A is in ['spmdtrain.data.a', 'spmdtrain.models.b']"
    ]


# --- one mood -------------------------------------------------------------------------------------

# Plurals that a docstring could begin with: nouns, though they end like a verb.
NOUNS = {
    "Bytes",
    "Channels",
    "Logits",
    "Queries",
    "Results",
    "Seconds",
    "This",
    "Tokens",
    "Windows",
}
RIDDLES = {"As", "How", "Of", "What", "Where", "Who"}
PROPERTIES = {"property", "cached_property", "functools.cached_property"}


def moods(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yields (line, name, complaint) of docstrings in another mood than the house's.

    A function says what it does in the third person ("Returns ..."), a property and a class what
    they are ("The ...").
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        words = (ast.get_docstring(node) or "The").split()
        first = words[0].rstrip(".,:;")
        is_verb = bool(re.fullmatch("[A-Z][a-z]+s", first)) and first not in NOUNS
        properties = PROPERTIES & {ast.unparse(each) for each in node.decorator_list}
        if isinstance(node, ast.ClassDef) or properties:
            if is_verb or first in RIDDLES:
                yield node.lineno, node.name, f"what is a thing begins with a noun, not {first!r}"
        elif not is_verb and ast.get_docstring(node):
            yield node.lineno, node.name, f"a function begins with a verb, not {first!r}"


def test_docstrings_are_in_one_mood():
    found = []
    for path in sorted(file for house in HOUSES for file in (ROOT / house).rglob("*.py")):
        for line, name, complaint in moods(ast.parse(path.read_text(encoding="utf-8"))):
            found.append(f"{path.relative_to(ROOT)}:{line}: {name}: {complaint}")
    assert found == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ('def size():\n    """Return the size."""', "begins with a verb"),
        ('def size():\n    """What there is."""', "begins with a verb"),
        ('def size():\n    """Bytes of it."""', "begins with a verb"),
        ('class A:\n    """Holds the size."""', "begins with a noun"),
        (
            'class A:\n    @property\n    def size(self):\n        """Returns it."""',
            "begins with a noun",
        ),
    ],
)
def test_a_docstring_in_another_mood_is_found(source, complaint):
    assert [complaint in said for *_, said in moods(ast.parse(source))] == [True]


def test_docstrings_in_the_mood_of_the_house_are_left_alone():
    source = (
        'class A:\n    """The size of a thing."""\n\n    @property\n    def size(self):\n'
        '        """True if it has one."""\n\n    def grow(self):\n        """Doubles the size."""'
    )
    assert list(moods(ast.parse(source))) == []
