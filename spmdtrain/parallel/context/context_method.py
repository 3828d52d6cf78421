"""Decides how attention reaches keys on other devices, and the order of tokens that this requires.

ring      keys and values go round, while the tokens are in zigzag order (ring.py)
ulysses   each device gets all tokens of some heads instead of some tokens of all (ulysses.py)
gather    every device gathers all keys and values

A ring needs another order: the sequence is cut into 2 n chunks, and device r of n has the chunks r
and 2 n - 1 - r, so that causal attention is the same work on each. Positions travel with the
tokens, and a model that is a function of tokens and positions gives the same results in any order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.parallel.axes import Rules, axes_of_dim

MethodName = Literal["ring", "gather", "ulysses"]
SETTING = "model.context_attention"


@dataclass(frozen=True)
class ContextMethod:
    """The method of a run in which mesh axes split the tokens of a sequence."""

    name: MethodName
    axes: tuple[str, ...]  # the mesh axes that split the tokens, major first
    ways: int  # devices along them
    reason: str = ""  # why it is not the ring, unless the settings name this method

    @property
    def line(self) -> str:
        """The line that a run prints about its method."""
        over = f"over {' x '.join(self.axes)} {self.ways}"
        if self.name == "ring":
            return f"attention: keys go round {over}, tokens are in zigzag order"
        if self.name == "ulysses":
            return f"attention: heads are exchanged for tokens {over}"
        why = f": {self.reason}" if self.reason else ""
        return f"attention: keys are gathered {over}{why}"

    @property
    def zigzag(self) -> int:
        """The number of devices for which tokens are in zigzag order; 1: they keep theirs."""
        return self.ways if self.name == "ring" else 1

    def token_order(self, tokens: int) -> np.ndarray | None:
        """Returns the token at each place, int [tokens]; None if tokens keep their places."""
        return zigzag_order(tokens, self.zigzag) if self.zigzag > 1 else None


def zigzag_order(tokens: int, ways: int) -> np.ndarray:
    """Returns the token at each place, int [tokens]; the tokens of a device are contiguous.

    `tokens` is a multiple of 2 `ways`, or `ways` is 1.
    """
    if ways == 1:
        return np.arange(tokens)
    chunks = np.arange(tokens).reshape(2 * ways, -1)
    both = np.stack([chunks[:ways], chunks[: ways - 1 : -1]], 1)  # [device, 2, chunk]
    return both.reshape(-1)


def find_context_method(
    requested: str, rules: Rules, tokens: int, heads: Mapping[str, int], order_reason: str = ""
) -> ContextMethod:
    """Returns the method of a run: `requested`, or the best that can run if that is "auto".

    Mesh axes split the tokens of a sequence.

    Args:
      tokens: the tokens of a sequence.
      heads: the numbers of heads that Ulysses divides, by setting.
      order_reason: why the model needs its tokens in their order; "" if it does not.

    Raises:
      ConfigError: the requested method cannot run.
    """
    (over_time,) = rules.activation_spec(("time",), (0,))
    axes = axes_of_dim(over_time)
    ways = int(np.prod([rules.sizes[axis] for axis in axes], dtype=int))
    if requested == "gather":
        return ContextMethod("gather", axes, ways)
    if requested == "ulysses":
        _check_heads(rules, heads, ways)
        return ContextMethod("ulysses", axes, ways)
    reason = order_reason
    if tokens % (2 * ways):
        reason = f"train.sequence_length={tokens} is not divisible by 2 x {ways} devices"
    if reason and requested == "ring":
        raise ConfigError(f"{SETTING}='ring' cannot run: {reason}", fix=f"--set {SETTING}=auto")
    return ContextMethod("gather" if reason else "ring", axes, ways, reason)


def _check_heads(rules: Rules, heads: Mapping[str, int], ways: int) -> None:
    """Refuses Ulysses if a device's heads do not divide by the devices of the tokens."""
    (over_heads,) = rules.activation_spec(("kv_heads",), (0,))
    parts = int(np.prod([rules.sizes[axis] for axis in axes_of_dim(over_heads)]))
    for setting, count in heads.items():
        here = count // parts
        if here % ways:
            raise ConfigError(
                f"{SETTING}='ulysses' cannot run: {setting}={count} leaves {here} heads for a "
                f"device, not divisible by the {ways} that share a sequence",
                fix=f"--set {SETTING}=auto",
            )
