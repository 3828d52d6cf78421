"""Each figure of README and docs/ that looks measured has a claim, or a reason for none."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("claims", ROOT / "docs" / "made" / "claims.py")
claims = importlib.util.module_from_spec(spec)
spec.loader.exec_module(claims)

SUM = """It takes 4.5 GB, and 12 % less than before.

<!-- claim: 4.5 after "memory: " by `python sum.py` on cpu -->
<!-- claim: 12 ± 25 % after "less " by `python sum.py` on gpu, seen 2026-11-01 -->
"""


def test_every_figure_of_the_documents_has_a_claim_or_a_reason():
    assert [
        fault for page, text in claims.pages().items() for fault in claims.faults_of(page, text)
    ] == []
    there = [
        claim for page, text in claims.pages().items() for claim in claims.claims_in(page, text)
    ]
    assert sum(claim.machine == "cpu" for claim in there) >= 15


def test_pages_without_claims_are_there():
    assert all((ROOT / "docs" / page).exists() for page in claims.MADE)


def test_a_claim_is_read():
    memory, less = claims.claims_in("page.md", SUM)
    assert (memory.figure, memory.after, memory.command) == ("4.5", "memory: ", "python sum.py")
    assert memory.low < 4.4501 < memory.high < 4.5501
    assert (less.low, less.high, less.machine, less.seen) == (9, 15, "gpu", "2026-11-01")


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("4.5 GB", "4.6 GB", "4.5 does not stand beside"),
        ("4.5 GB", "14.5 GB", "4.5 does not stand beside"),
        ("on cpu", "on a laptop", "not a claim"),
        (", seen 2026-11-01", "", "when it was seen"),
        ("4.5 after", "4.5 behind", "not a claim"),
        ("before.", "before.\n\nThis.\n\nThat takes 3 s.\n\nEnd.", "no claim and no reason"),
    ],
)
def test_what_is_wrong_with_a_page_is_said(was, becomes, said):
    assert claims.faults_of("page.md", SUM) == []
    found = claims.faults_of("page.md", SUM.replace(was, becomes))
    assert any(said in fault for fault in found), found


def test_numbers_are_measured_once_for_each_command(tmp_path, monkeypatch):
    (tmp_path / "sum.py").write_text(
        "open('runs', 'a').write('x')\nprint('memory:   1,004.46\\nless\\n-1.5e2')"
    )
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    found = [number for _, number in claims.measured([*claims.claims_in("page.md", SUM)])]
    assert found == [1004.46, 150.0] and (tmp_path / "runs").read_text() == "x"
    (tmp_path / "sum.py").write_text("print('memory: 4.5'); raise SystemExit(1)")
    assert [number for _, number in claims.measured([*claims.claims_in("page.md", SUM)])] == [
        None
    ] * 2
