"""The cases of the battery: what is promised, and how often each is tried.

A case takes a folder and turns, breaks something in each turn, and returns what was measured:
`passed` says whether all was as promised, and `control` what the detector says where it is switched
off, or nothing is broken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.damage import cut, flip_bit
from faults.disks import slow_disk
from faults.endings import asked_to_end, failures
from faults.files import attacks, damaged, damaged_for_two
from faults.killed import fewer, kills_of_a_rank, kills_while_saving, sigkills
from faults.numbers import bad_steps, flipped_copies, watched
from faults.soak import soak
from faults.turns import Figures, Turns


@dataclass(frozen=True)
class Case:
    """`quick` and `full`: how many turns, in the tests and for docs/faults.md."""

    name: str
    promise: str
    run: Callable[[Path, Turns], Figures]
    quick: int
    full: int


CASES = [
    Case(
        "bit flips",
        "What is read is what was saved, or the step before.",
        damaged(flip_bit),
        12,
        200,
    ),
    Case("cuts", "The same, where files are cut or missing.", damaged(cut), 6, 50),
    Case(
        "damage for two",
        "Two processes agree on the step before, where one of them finds its part damaged.",
        damaged_for_two,
        1,
        6,
    ),
    Case(
        "slow disk",
        "Saving in the background holds no step; one save waits for the one before it.",
        slow_disk,
        1,
        3,
    ),
    Case(
        "hostile",
        "A run directory from somebody else is refused; nothing outside it is touched.",
        attacks,
        11,
        11,
    ),
    Case(
        "SIGKILL",
        "No step that was acknowledged is lost; the losses stay the same.",
        sigkills,
        1,
        200,
    ),
    Case(
        "SIGKILL of a rank",
        "The same with two processes, and the other one ends soon.",
        kills_of_a_rank,
        1,
        50,
    ),
    Case(
        "SIGKILL while saving",
        "Wherever a save is cut off, the run goes on from the newest complete step.",
        kills_while_saving,
        3,
        12,
    ),
    Case(
        "failures",
        "A process that dies, fails or hangs ends all, with the code that the docs say.",
        failures,
        1,
        10,
    ),
    Case(
        "asked to end",
        "SIGTERM lets the step in flight end and saves it; a second one ends the process at once.",
        asked_to_end,
        1,
        4,
    ),
    Case(
        "fewer",
        "Started again with fewer processes, the run takes another mesh and the same batches.",
        fewer,
        1,
        6,
    ),
    Case(
        "bad steps",
        "A spike is skipped, and from several the run goes back, to the last bit.",
        bad_steps,
        2,
        24,
    ),
    Case(
        "flipped copies",
        "A device that holds other bits than its copies is named.",
        flipped_copies,
        12,
        200,
    ),
    Case(
        "watched",
        "Of two processes, the slow one and the one with a broken device are named.",
        watched,
        1,
        10,
    ),
    Case(
        "soak",
        "Killed, stopped and crashing processes, damaged checkpoints: the run goes on.",
        soak,
        1,
        40,
    ),
]
