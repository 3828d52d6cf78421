"""The fuzzer of data: it finds what is planted, and its first cases hold.

`make fuzz-data` examines them by the thousand.
"""

import functools
import json
import sys
import time

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("zstandard")
pytest.importorskip("tokenizers")

from fuzz_data import campaign  # noqa: E402
from fuzz_data.case import Case, draw  # noqa: E402
from fuzz_data.worker import timed  # noqa: E402
from spmdtrain import cli  # noqa: E402
from spmdtrain.cli import command  # noqa: E402
from spmdtrain.config.errors import DataError  # noqa: E402
from spmdtrain.data.batches import EvalWindows  # noqa: E402
from spmdtrain.data.corpus import Corpus  # noqa: E402
from spmdtrain.data.prepare import prepare_corpus  # noqa: E402
from spmdtrain.data.prepare.token_writer import TokenWriter  # noqa: E402
from spmdtrain.data.token_files import cut_files, tokens  # noqa: E402

ENOUGH = 150  # cases, among which each planted fault shows
SLICE = 500  # cases that every run of the tests examines


@pytest.fixture(autouse=True)
def one_parser(monkeypatch):
    """Makes the parser of arguments once, and not for each case."""
    monkeypatch.setattr(command, "make_parser", functools.cache(command.make_parser))


def is_found(kind):
    """Whether a finding of this kind is among the first cases."""
    return any(kind in timed(draw(seed)).kind for seed in range(ENOUGH))


def test_a_case_is_the_same_from_its_seed_and_from_its_words():
    for seed in range(200):
        case = draw(seed)
        assert case == draw(seed) and case.seed == seed
        (again,) = [Case(**json.loads(case.spoken()))]
        assert again == case


def test_a_writer_that_drops_a_document_is_found(monkeypatch):
    whole = TokenWriter.write

    def without_last(self, encoded):
        whole(self, encoded.cut(len(encoded.lengths) - 1)[0] if self.tokens else encoded)

    monkeypatch.setattr(TokenWriter, "write", without_last)
    assert is_found("another number of documents")


def test_a_reader_that_takes_a_cut_file_for_whole_is_found(monkeypatch):
    whole = prepare_corpus.read_chunks

    def as_far_as_it_goes(*arguments):
        try:
            yield from whole(*arguments)
        except DataError:
            return

    monkeypatch.setattr(prepare_corpus, "read_chunks", as_far_as_it_goes)
    assert is_found("is not whole is taken")


def test_a_reader_that_shifts_by_a_token_is_found(monkeypatch):
    whole = Corpus.read
    monkeypatch.setattr(
        Corpus, "read", lambda self, start, stop: whole(self, start, stop)[::-1].copy()
    )
    assert is_found("is not what was written")


def test_an_evaluation_that_leaves_out_a_window_is_found(monkeypatch):
    whole = EvalWindows.samples

    def without_first(self, indices):
        batch = whole(self, indices)
        batch["mask"][0] = 0
        return batch

    monkeypatch.setattr(EvalWindows, "samples", without_first)
    assert is_found("an evaluation is not what was written")


def test_a_mixture_that_trains_on_what_validates_is_found(monkeypatch):
    case = Case(0, "nanogpt", documents=5, files=3, reads="shared", fraction=0.3)
    assert timed(case).how == "passed"
    monkeypatch.setattr(cut_files, "cut_shared_files", lambda corpora, _: corpora)
    assert timed(case).kind == "tokens that validate are trained on"


def test_a_fingerprint_without_the_content_is_found(monkeypatch):
    monkeypatch.setattr(tokens, "hash_of_blocks", lambda path, size: f"{path} {size}")
    assert is_found("other content has the same fingerprint")


def test_a_traceback_a_hang_and_a_refusal_of_two_lines_are_found(monkeypatch):
    case = Case(0, "jsonl")

    def raises(_):
        raise KeyError("text")

    monkeypatch.setattr(cli, "main", raises)
    assert "KeyError" in timed(case).kind
    monkeypatch.setattr(cli, "main", lambda _: time.sleep(9))
    assert timed(case, seconds=0.1).kind == "hangs"
    monkeypatch.setattr(cli, "main", lambda _: print("a\nb", file=sys.stderr) or 5)
    assert "without one line" in timed(case).kind
    monkeypatch.setattr(cli, "main", lambda _: print("spmdtrain: no 'a'", file=sys.stderr) or 5)
    assert timed(case).kind == "valid jsonl is refused: no _"


def test_a_case_that_ends_its_process_is_found(monkeypatch):
    said = json.dumps({"begins": Case(3, "text").spoken()})
    program = f"import os; print({said!r}, flush=True); os.abort()"
    monkeypatch.setattr(campaign, "WORKER", (sys.executable, "-c", program))
    (line,) = campaign.answers([])
    assert line["kind"] == "ends the process with -6" and line["case"]["seed"] == 3


def test_a_finding_is_made_smaller(monkeypatch):
    case = Case(0, "jsonl", documents=30, files=3, tokenizer="characters", length=16)

    def answers(arguments):
        spoken = Case(**json.loads(arguments[1]))
        return [{"kind": "fault" if spoken.documents >= 3 else "", "how": "found"}]

    monkeypatch.setattr(campaign, "answers", answers)
    line = {"case": {"seed": 0, "format": "jsonl", "documents": 30, "files": 3}, "kind": "fault"}
    assert campaign.smaller(line) == Case(0, "jsonl", documents=3) != case


@pytest.mark.long
def test_the_first_cases_hold():
    lines = list(campaign.answers(["0", str(SLICE)]))
    assert [line["case"]["seed"] for line in lines] == list(range(SLICE))
    assert not [
        campaign.told(line, Case(**line["case"])) for line in lines if line["how"] == "found"
    ]
    assert {line["how"] for line in lines} == {"passed", "refused"}
