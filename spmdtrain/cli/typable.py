"""Makes sure that the remedy of an error is something that the typed command accepts.

Deeper parts of the program propose what `train` would accept. A command that reads a run refuses to
change what the run is, and has fewer options.
"""

import argparse
import re

from spmdtrain.config.errors import UserError
from spmdtrain.config.settable import is_settable

SETTING = re.compile(r"--set ['\"]?([a-z_]+(?:\.[\w.]+)+)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# Another command to type instead of this one, with other options.
OTHER_COMMAND = re.compile(r"\b(?:spmdtrain|pip|make|srun|sbatch|env|apt) .*|`.*?`")
ALTERNATIVES = re.compile(r",? or (?=-|another |training |[a-z]+ = )")


def make_typable(error: UserError, parsed: argparse.Namespace) -> None:
    """Removes from the remedy of an error whatever this command would refuse.

    If nothing is left, the remedy says where it applies.
    """
    if not untaken(error.fix, parsed):
        return
    alternatives = ALTERNATIVES.split(error.fix)
    typable = [remedy for remedy in alternatives if not untaken(remedy, parsed)]
    if typable:
        error.propose(", or ".join(typable))
    elif any(name.startswith("--") for name in untaken(error.fix, parsed)):
        error.propose(f"{error.fix}, an option of another command")
    else:
        error.propose(f"{error.fix} in training; a run is read with the settings it was made with")


def untaken(fix: str, parsed: argparse.Namespace) -> list[str]:
    """Returns the options and settings that a remedy names and that the command does not take."""
    here = OTHER_COMMAND.sub("", fix)
    settings = [key for key in SETTING.findall(here) if not is_settable(key, parsed.settable)]
    taken = {*parsed.options, "--set"}  # where there is no --set, nothing is settable
    return [option for option in OPTION.findall(here) if option not in taken] + settings
