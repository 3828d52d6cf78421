"""Checks the arguments of the public functions: each mistake is a ValueError of one line.

For a traced array, shape and dtype are known, but no numbers.
"""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_arrays(op: str, **arrays: Any) -> None:
    """Raises ValueError if one of them is neither an array nor None."""
    for name, x in arrays.items():
        if x is not None and not isinstance(x, jax.Array | np.ndarray):
            raise ValueError(f"{op}: {name} is {_shown(x)}, not an array")


def check_ids(op: str, name: str, ids: Any) -> None:
    """Raises ValueError if an array does not hold integers that fit int32."""
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{op}: {name} is {ids.dtype}, not integers")
    # One of jax has at most 32 bits already, unless the user has asked for 64.
    if isinstance(ids, np.ndarray) and ids.size:
        for number in (ids.min(), ids.max()):
            if not -(2**31) <= number < 2**31:
                raise ValueError(f"{op}: {name} has {number}, which is not an int32")


def check_floating(op: str, name: str, x: Any) -> None:
    """Raises ValueError if an array is not floating."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{op}: {name} is {x.dtype}, not floating")


def as_number(op: str, name: str, value: Any, least: float = -math.inf) -> float:
    """Returns a finite float32 of at least `least`. Raises ValueError for anything else."""
    number = math.nan
    if isinstance(value, int | float | np.number | jax.Array | np.ndarray) and not _is_bool(value):
        number = float(value) if np.ndim(value) == 0 and abs(value) < 3e38 else math.nan
    if not least <= number < math.inf:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"{op}: {name}={_shown(value)} is not a finite number{bound}")
    return number


def as_whole(op: str, name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    """Returns a whole number from `least` to `most`. Raises ValueError for anything else."""
    try:
        number = None if _is_bool(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        above = f" and at most {most}" if number is not None and number > most else ""
        shown = _shown(value)
        raise ValueError(f"{op}: {name}={shown} is not a whole number of at least {least}{above}")
    return number


def check_flag(op: str, name: str, value: Any) -> None:
    """Raises ValueError if the value is neither True nor False: "no" would count as true."""
    if not _is_bool(value) or np.ndim(value):
        raise ValueError(f"{op}: {name}={_shown(value)} is neither True nor False")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"


def _shown(value: Any) -> str:
    if hasattr(value, "dtype") and getattr(value, "shape", ()) != ():
        return f"{value.dtype}{list(value.shape)}"
    return f"{value}" if hasattr(value, "dtype") else f"{value!r:.60}"
