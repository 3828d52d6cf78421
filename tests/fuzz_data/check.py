"""Says what must hold of a case, and examines it.

1. Nothing ends in a traceback, and nothing hangs (worker.py watches the time).
2. A refusal is one line, and leaves no half-written file.
3. What is valid is taken.
4. What `data prepare` writes is exactly what `expected` reads in its input, document by document.
5. What a run reads in an epoch is what was written, every token once.
6. No token that validates is trained on, whatever files the sources of a mixture share.
7. Other content is known by its fingerprint, though its size and its times are the same.
"""

import contextlib
import io
import os
import re
import traceback
from pathlib import Path
from typing import NamedTuple

from fuzz_data import reading
from fuzz_data.case import Case
from fuzz_data.conserved import compare_documents, is_learned
from fuzz_data.damage import damage
from fuzz_data.expected import Unreadable, documents_of, foreign_ids_of, ids_of
from fuzz_data.formats import Made, make_documents, make_foreign
from fuzz_data.texts import LAST_POINT
from fuzz_data.wrong import Wrong
from spmdtrain import cli
from spmdtrain.config.errors import UserError
from spmdtrain.data.texts import documents

REFUSALS = (4, 5, 10)  # exit codes of the command line
LONGEST_LINE = 3000  # characters of a refusal
LONG_NAME = "n" * 300
NAMES = re.compile(r"'[^']*'|\S*/\S*|U\+\w+|\d+")  # quoted texts, paths and numbers


class Outcome(NamedTuple):
    """How a case ended: "passed", "refused" or "found"."""

    how: str
    said: str  # the refusal, or what was found
    kind: str = ""  # of what was found: those of one kind are one fault


def examine(case: Case, folder: Path) -> Outcome:
    """Make the files of a case in an empty folder, and see that all holds."""
    try:
        with _small_chunks(case):
            if case.is_prepared:
                return _examine_documents(case, folder)
            return _examine_tokens(case, folder)
    except Wrong as wrong:
        return Outcome("found", str(wrong), wrong.kind)
    except UserError as refusal:
        return _refused(case, str(refusal))
    except (Exception, SystemExit) as error:
        return Outcome("found", traceback.format_exc(), kind_of(error))
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, which no Exception is
            raise
        return Outcome("found", traceback.format_exc(), kind_of(error))


def kind_of(error: BaseException) -> str:
    """Return the name of an error, and where in the framework it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/spmdtrain/" in frame.filename] or frames
    return f"{type(error).__name__} in {Path(ours[-1].filename).name}:{ours[-1].name}"


@contextlib.contextmanager
def _small_chunks(case: Case):
    """Cut files into chunks as small as the case says, so that small files have borders too."""
    names = [name for name in ("CHUNK_BYTES", "CHUNK_ROWS") if hasattr(documents, name)]
    usual = {name: getattr(documents, name) for name in names}
    for name in names:
        setattr(documents, name, case.chunk)
    try:
        yield
    finally:
        for name, value in usual.items():
            setattr(documents, name, value)


def _refused(case: Case, line: str, *, must_take: bool | None = None) -> Outcome:
    if "\n" in line or len(line) > LONGEST_LINE:
        raise Wrong("a refusal is more than a line", line[:2000])
    if case.may_be_read if must_take is None else must_take:
        return Outcome("found", line, f"valid {case.format} is refused: {_without_names(line)}")
    return Outcome("refused", line)


def _without_names(line: str) -> str:
    """Return how a refusal begins, without what differs between two of one fault."""
    return NAMES.sub("_", line.removeprefix("spmdtrain: "))[:60]


# --- documents ----------------------------------------------------------------------------------


def _examine_documents(case: Case, folder: Path) -> Outcome:
    made = make_documents(case, folder)
    if not made.is_odd and _filled(documents_of(case, made)) != _filled(made.documents):
        raise Wrong("the fuzzer reads other documents than it wrote")
    damage(case, made)
    try:
        expected = documents_of(case, made)
    except Unreadable:
        expected = None
    out = _place(case, folder)
    refusal = prepare(case, made, out)
    if refusal is None:
        paths = _written(case, out)
        compare_documents(case, made, expected, paths)
        _go_on(case, made, out)
        return reading.examine(case, made, paths, [ids_of(path) for path in paths])
    _see_nothing_left(case, folder, out)
    must_take = case.may_be_read and not made.is_odd and _is_taken(case, expected)
    return _refused(case, refusal, must_take=must_take)


def _is_taken(case: Case, expected: list | None) -> bool:
    """Return whether documents are whole, and enough to learn from."""
    if expected is None or not any(expected):
        return False
    ends_by_it = case.tokenizer == "characters" and case.end_of_text == "auto"
    if ends_by_it and repr(LAST_POINT)[1:-1] in repr(expected):
        return False
    return not case.chat or all(any(map(is_learned, each)) for each in expected if each)


def _filled(documents: list) -> list:
    """Return the documents that are not empty, without keys that a table has added."""
    return [
        [{key: value for key, value in message.items() if value is not None} for message in each]
        if isinstance(each, list)
        else each
        for each in documents
        if each
    ]


def prepare(case: Case, made: Made, out: Path) -> str | None:
    """Run `data prepare` in this process, and return its refusal; None where it has written."""
    named = [str(path) for path in made.paths]
    if case.reads_glob and case.format != "dataset":
        named = [str(made.folder / "in-*")]
    arguments = ["data", "prepare", *named, "--out", str(out)]
    arguments += ["--tokenizer", str(made.tokenizer or case.tokenizer)]
    arguments += ["--end-of-text", case.end_of_text]
    if made.field_name not in ("text", "messages"):
        arguments += ["--field", made.field_name]
    if case.split_on is not None:
        arguments += [f"--split-on={case.split_on}"]
    if case.chat:
        arguments += ["--chat", "--template", case.template]
    if case.shard_tokens:
        arguments += ["--shard-tokens", str(case.shard_tokens)]
    return command(arguments)


def command(arguments: list[str]) -> str | None:
    """Run a command in this process, and return the line with which it was refused, or None."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = cli.main(arguments)
    lines = errors.getvalue().splitlines()
    refusals = [line for line in lines if line.startswith("spmdtrain: ")]
    if code == 0:
        return None
    if code not in REFUSALS or len(refusals) != 1 or lines[-1] != refusals[0]:
        raise Wrong(f"exit code {code} without one line that says why", errors.getvalue()[-2000:])
    return refusals[0]


def _place(case: Case, folder: Path) -> Path:
    """Return where a case writes; something may lie there."""
    out = folder / "out"
    if case.out == "exists":
        out.with_suffix(".bin").write_bytes(b"precious")
        (folder / "out-00000.bin").write_bytes(b"precious")
    elif case.out == "fifo":
        os.mkfifo(out.with_suffix(".bin"))
        os.mkfifo(folder / "out-00000.bin")
    elif case.out == "below_a_file":
        out.write_bytes(b"precious")
        out = out / "below"
    elif case.out == "long":
        out = folder / LONG_NAME
    return out


def _written(case: Case, out: Path) -> list[Path]:
    """Return the token files, in order."""
    if case.out != "fresh":
        raise Wrong("a place that cannot be written to is taken", case.out)
    paths = sorted(out.parent.glob("out-*.bin")) if case.shard_tokens else [out.with_suffix(".bin")]
    if not all(path.is_file() for path in paths) or not paths:
        raise Wrong("nothing was written, and nothing said")
    return paths


def _see_nothing_left(case: Case, folder: Path, out: Path) -> None:
    """See that a refused prepare has left nothing that passes for whole."""
    left = [path.name for path in folder.rglob("*.partial")]
    if not case.shard_tokens and case.out == "fresh":
        endings = (".bin", ".idx", ".json", ".loss")
        left += [out.name + ending for ending in endings if out.with_suffix(ending).exists()]
    if left:
        raise Wrong("a refused prepare has left files", ", ".join(left))
    for path in (out.with_suffix(".bin"), folder / "out-00000.bin"):
        if case.out == "exists" and path.read_bytes() != b"precious":
            raise Wrong("a file that was there is overwritten", path.name)


def _go_on(case: Case, made: Made, out: Path) -> None:
    """See that a finished prepare of shards is not begun again."""
    if not case.shard_tokens:
        return
    before = {path: path.stat().st_mtime_ns for path in out.parent.glob("out-*")}
    refusal = prepare(case, made, out)
    after = {path: path.stat().st_mtime_ns for path in out.parent.glob("out-*.bin")}
    if refusal or any(before.get(path) != time for path, time in after.items()):
        raise Wrong("a finished prepare is not taken as it is", refusal or "written again")


# --- token files --------------------------------------------------------------------------------


def _examine_tokens(case: Case, folder: Path) -> Outcome:
    if not case.format.startswith("ours"):
        made = make_foreign(case, folder)
    else:
        made = _make_ours(case, folder)
    if not made.paths:
        return Outcome("refused", "no documents")
    damage(case, made)
    if case.format == "plain":
        files = reading.plain_ids(case, made)
    else:
        files = [_ids_or_none(case, path) for path in made.paths]
    return reading.examine(case, made, made.paths, files)


def _ids_or_none(case: Case, path: Path):
    try:
        return ids_of(path) if case.format.startswith("ours") else foreign_ids_of(case, path)
    except Unreadable:
        return None


def _make_ours(case: Case, folder: Path) -> Made:
    """Write token files of ours, which `data prepare` makes of JSON lines."""
    whole = Made(folder)
    for number in range(case.files):
        inner = folder / f"source-{number}"
        inner.mkdir()
        source = Case(case.seed * 10 + number, "jsonl", chat=case.chat, documents=case.documents)
        made = make_documents(source, inner)
        out = folder / f"in-{number}.bin"
        refusal = prepare(source, made, out)
        if refusal is not None and not made.is_odd and _is_taken(source, made.documents):
            raise Wrong("valid jsonl is refused", refusal)
        if refusal is None:
            whole.paths.append(out)
            whole.holders.append(out)
    return whole
