"""Leaves out the settings that only the training of a whole run has (`Settings.of_whole_run`).

What reads a run for its model, or takes a few steps of it, does without them.
"""

from typing import Any

from spmdtrain.config.sections import listed


def of_whole_run() -> list[str]:
    """Returns the dotted names of these settings; one that ends in a dot stands for a section."""
    return listed("of_whole_run")


def leave_out(values: dict[str, dict[str, Any]]) -> None:
    """Takes these settings out of JSON values by section, so that they get their defaults."""
    for name in of_whole_run():
        section, _, setting = name.partition(".")
        if setting:
            values[section].pop(setting, None)
        else:
            values[section] = {}
