"""Reads and writes which layers have a window: a list, a period, or a first layer."""

from collections.abc import Sequence

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.published.families.family import ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import FULL, WINDOW
from spmdtrain.config.schema import TransformerConfig


def shortest(pattern: Sequence) -> list:
    """Returns the shortest list that gives the pattern when repeated.

    In one pass (Knuth, Morris and Pratt): `borders` has, for each beginning of the pattern, the
    length of the longest shorter beginning that also ends it.
    """
    borders = [0] * (len(pattern) + 1)
    for end in range(2, len(pattern) + 1):
        border = borders[end - 1]
        while border and pattern[end - 1] != pattern[border]:
            border = borders[border]
        borders[end] = border + (pattern[end - 1] == pattern[border])
    return list(pattern[: len(pattern) - borders[-1]])


def read_windows(keys: Keys, has_window: Sequence[bool]) -> ModelSettings:
    """Returns `windows`: by `layer_types` if there is one, else by `has_window` of each layer."""
    window = keys.whole("sliding_window")
    layers = keys.count("num_hidden_layers")
    kinds = keys.take("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise keys.refused("layer_types", kinds, f"a list of {layers} kinds")
        for kind in kinds:
            if kind not in (FULL, WINDOW):
                raise ConfigError(
                    f"{keys.where}: {kind!r} in layer_types has no setting here",
                    fix=f"a model of {FULL} and {WINDOW}",
                )
        has_window = [kind == WINDOW for kind in kinds]
    if window is None or not any(has_window):
        return {}
    if window == 0:
        raise keys.refused("sliding_window", window, "at least 1")
    return {"windows": shortest([window if has else 0 for has in has_window])}


def turning_with_a_window(windows: ModelSettings) -> ModelSettings:
    """Returns `windows`, and `rope_layers` if some layers have none: those do not turn."""
    has_window = [window > 0 for window in windows.get("windows", (0,))]
    return windows if all(has_window) else windows | {"rope_layers": has_window}


def windows_if_used(keys: Keys, has_window: Sequence[bool]) -> ModelSettings:
    """Returns what `read_windows` does, if `use_sliding_window` says that there are any."""
    windows = read_windows(keys, has_window)
    return windows if keys.flag("use_sliding_window") else {}


def all_layers(keys: Keys) -> list[bool]:
    """Gives every layer a window."""
    return [True] * keys.count("num_hidden_layers")


def all_but_each(keys: Keys, pattern: int) -> list[bool]:
    """Gives every layer a window, except each `pattern`-th."""
    return [(number + 1) % pattern != 0 for number in range(keys.count("num_hidden_layers"))]


def window_of(model: TransformerConfig) -> int | None:
    """Returns the longest window of a model, or None if no layer has one."""
    return max((kind.window for kind in model.layer_kinds), default=0) or None


def layer_types_of(model: TransformerConfig) -> list[str]:
    """Returns the key `layer_types` of a model."""
    return [WINDOW if kind.window else FULL for kind in model.layer_kinds]
