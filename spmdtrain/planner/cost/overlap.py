"""Finds the share of each kind of traffic that overlaps with work, and what hiding it costs.

For this framework the shares are read off compiled steps: off the step itself if it has been
compiled (`estimate --compile`, `plan --compile`), otherwise they are means over the fleet
(fleet_overlap.json, which `make fleet` writes). For other frameworks they are assumed
(software.py).
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

# Work takes 18.9 % longer during a collective, on average over models, sizes and devices, and 40 %
# at most (arXiv 2507.03114). This is the share of such a second that is lost.
LOST_BESIDE_COLLECTIVES = 1 - 1 / 1.189

FLEET = "fleet_overlap.json"  # in this folder


@dataclass(frozen=True)
class Overlap:
    """The share of the bytes of each kind of traffic whose transfer overlaps with work."""

    tensor: float = 0.0  # activations over `tensor`, around whole matmuls
    collective_matmul: float = 1.0  # the same, around matmuls in pieces
    context: float = 0.0  # keys, values and their gradients
    expert: float = 0.0  # tokens on their way to their experts and back
    fsdp: float | None = None  # weights and their gradients; None: of all layers but the first
    data: float = 0.0  # gradients, and with ZeRO-1 new weights
    vocabulary: float = 0.0  # sums over `pipeline`
    hops: float = 0.0  # what a stage sends to the next one


def left_over(seconds: float, hidden: float) -> float:
    """Returns the seconds that a collective adds to a step that hides `hidden` of its seconds."""
    return seconds - hidden + LOST_BESIDE_COLLECTIVES * hidden


def exposed(seconds: float, share: float) -> float:
    """Returns the seconds that a collective adds to a step that hides this share of it."""
    return left_over(seconds, share * seconds)


def saving(share: float) -> float:
    """Returns the share that must be hidden to save this `share` of the seconds."""
    return share / (1 - LOST_BESIDE_COLLECTIVES)


def hidden_shares(
    traffic: Sequence[Mapping[str, Any]], *, pipelined: bool, collective_matmul: bool
) -> dict[str, float]:
    """Returns field of `Overlap` -> share, from the traffic of a compiled step (`hlo.traffic`).

    Kinds that the step does not send are left out, and so are sums over several axes at once, which
    are small. With a pipeline, weights cross `fsdp` once a step without any overlap; the formulas
    need no share for that.
    """
    kinds = {field.name for field in fields(Overlap)}
    sent: dict[str, float] = defaultdict(float)
    hidden: dict[str, float] = defaultdict(float)
    for collective in traffic:
        kind = collective["axis"]
        if kind == "pipeline":
            kind = "hops" if collective["kind"] == "collective-permute" else "vocabulary"
        elif kind == "tensor" and collective_matmul:
            kind = "collective_matmul"
        elif kind == "fsdp" and pipelined:
            continue
        elif kind == "expert" and collective["kind"] != "all-to-all":
            continue  # gradients of weights that `expert` does not own
        if kind in kinds:
            sent[kind] += collective["sent"]
            hidden[kind] += collective["sent_beside_work"]
    return {kind: hidden[kind] / total for kind, total in sent.items() if total}


@cache
def fleet_overlap(family: str) -> Overlap:
    """Returns the means over the fleet's layouts on GPUs of this family, "a100" or "h100".

    Traffic that no layout on A100s sends takes the mean of those on H100s.
    """
    tables = json.loads(Path(__file__).with_name(FLEET).read_text(encoding="utf-8"))
    return Overlap(**(tables["h100"] | tables[family]))
