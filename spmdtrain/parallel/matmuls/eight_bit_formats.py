"""Chooses the functions of a format of 8-bit floats, and imports no others."""

from collections.abc import Callable
from typing import NamedTuple, cast

from spmdtrain.config.schema import Narrow
from spmdtrain.parallel.copies import Dot


class Format(NamedTuple):
    """A format of the operands of matmuls.

    `check(kind of device)` refuses devices without it. `in_parts`: XLA cannot partition its dot, so
    each device multiplies its own parts (local_matmul.py).
    """

    dot: Dot
    check: Callable[[str], None]
    in_parts: bool


def format_of(narrow: Narrow) -> Format:
    """Returns the format of this name."""
    if narrow == "mxfp8":
        from spmdtrain.parallel.matmuls import mxfp8

        return Format(cast(Dot, mxfp8.tensordot), mxfp8.check_mxfp8, in_parts=True)
    from spmdtrain.parallel.matmuls import float8

    return Format(cast(Dot, float8.tensordot), float8.check_float8, in_parts=False)
