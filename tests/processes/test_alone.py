"""What one process does alone waits for no other: it would wait for ever.

Read from the code: what stands below `if jax.process_index() == 0`, and what a thread is given,
reaches no collective by any function that it names. A block of `apart` is as one process.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import spmdtrain

ROOT = Path(spmdtrain.__file__).parent
# What every process must call, or those that do wait for those that do not.
COLLECTIVES = {
    "any_process",
    "of_process_0",
    "gather_texts",
    "together",
    "sync_global_devices",
    "process_allgather",
    "broadcast_one_to_all",
}
FIRST = ("jax.process_index() == 0", "process == 0", "this_process()[0] == 0")


def parsed() -> dict[str, ast.Module]:
    """Every file by the name of its module."""
    return {
        ".".join(("spmdtrain", *path.relative_to(ROOT).with_suffix("").parts)): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in ROOT.rglob("*.py")
    }


class Code:
    """The functions of all files, and whom each name in a file means."""

    def __init__(self, modules: dict[str, ast.Module]):
        self.functions: dict[str, ast.AST] = {}
        self.names: dict[str, dict[str, str]] = {}
        for module, tree in modules.items():
            self.names[module] = {}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    named = {each.asname or each.name: each.name for each in node.names}
                    self.names[module] |= {ours: f"{node.module}.{n}" for ours, n in named.items()}
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self.functions[f"{module}.{node.name}"] = node
                    self.names[module][node.name] = f"{module}.{node.name}"

    def way(self, module: str, node: ast.AST, seen: frozenset[str] = frozenset()) -> list[str]:
        """The calls that lead from `node` to a collective; none if it reaches none."""
        for name in _named(node):
            if name in COLLECTIVES:
                return [name]
            meant = self.names[module].get(name)
            if meant is None or meant not in self.functions or meant in seen:
                continue
            found = self.functions[meant]
            if isinstance(found, ast.ClassDef):  # its constructor alone: no method is called yet
                found = next((n for n in found.body if getattr(n, "name", "") == "__init__"), None)
            way = found and self.way(meant.rpartition(".")[0], found, seen | {meant})
            if way:
                return [name, *way]
        return []


def _named(node: ast.AST) -> Iterator[str]:
    """The functions that a piece of code names, called or handed on; not those in `apart`."""
    if isinstance(node, ast.With) and "apart()" in ast.unparse(node.items[0]):
        return
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    for child in ast.iter_child_nodes(node):
        yield from _named(child)


def alone(module: str, tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """(where, code) of all that one process or one thread does by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith(FIRST):
            for each in node.body:
                yield f"{module}:{each.lineno}", each
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and called.endswith(("submit", "Thread")):
            given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "target")]
            for each in given:
                yield f"{module}:{node.lineno}", each


MODULES = parsed()
CODE = Code(MODULES)


def test_nothing_that_one_process_does_alone_holds_a_collective():
    pieces = [(where, code) for name, tree in MODULES.items() for where, code in alone(name, tree)]
    assert len(pieces) > 15
    wrong = {where: way for where, code in pieces if (way := CODE.way(where.split(":")[0], code))}
    assert not wrong, wrong


@pytest.mark.parametrize(
    "text",
    [
        "if jax.process_index() == 0:\n    any_process(True)",
        "if process == 0:\n    export_run(run, out)",
        "pool.submit(export_run, run)",
        "Thread(target=export_run)",
    ],
)
def test_such_code_is_found(text):
    imports = "from spmdtrain.running.published.export_run import export_run\n"
    tree = ast.parse(imports + text)
    code = Code(MODULES | {"own": tree})
    assert [code.way("own", piece) for _, piece in alone("own", tree)] != [[]]


def test_a_block_apart_waits_for_nobody():
    called = "from spmdtrain.running.published.export_run import export_run\nif process == 0:\n"
    tree = ast.parse(called + "    with apart():\n        export_run(run, out)")
    code = Code(MODULES | {"own": tree})
    assert [code.way("own", piece) for _, piece in alone("own", tree)] == [[]]
