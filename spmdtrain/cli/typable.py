"""What an error tells a person to type is what the command takes that they have typed.

A deeper part of the program proposes what training would take. A command that reads a run refuses
to change what the run is, and has fewer options.
"""

import argparse
import re

from spmdtrain.config.errors import UserError
from spmdtrain.config.settable import is_settable

SETTING = re.compile(r"--set ['\"]?([a-z_]+(?:\.[\w.]+)+)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# What is typed instead of this command, with options of its own.
OTHER_COMMAND = re.compile(r"\b(?:spmdtrain|pip|make|srun|sbatch|env|apt) .*|`.*?`")
ALTERNATIVES = re.compile(r",? or (?=-|another |[a-z]+ = )")


def make_typable(error: UserError, parsed: argparse.Namespace) -> None:
    """Takes out of the `try` of an error what this command would refuse.

    If nothing is left, it says who takes it.
    """
    if not untaken(error.fix, parsed):
        return
    alternatives = ALTERNATIVES.split(error.fix)
    typable = [each for each in alternatives if not untaken(each, parsed)]
    if typable:
        error.propose(", or ".join(typable))
    elif any(name.startswith("--") for name in untaken(error.fix, parsed)):
        error.propose(f"{error.fix}, an option of another command")
    else:
        error.propose(f"{error.fix} in training; a run is read with the settings it was made with")


def untaken(fix: str, parsed: argparse.Namespace) -> list[str]:
    """Returns the options and settings that a `try` names and that the command does not take."""
    here = OTHER_COMMAND.sub("", fix)
    settings = [key for key in SETTING.findall(here) if not is_settable(key, parsed.settable)]
    taken = {*parsed.options, "--set"}  # where there is no --set, nothing is settable
    return [option for option in OPTION.findall(here) if option not in taken] + settings
