"""Types what an error tells a person to try, for every refusal of a command in any test: the `try`
must be no mistake itself.
"""

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from spmdtrain.cli import command
from spmdtrain.cli.typable import make_typable, untaken
from spmdtrain.config import UserError, load

IN_TRAINING = " in training; a run is read with the settings"
SETTINGS = re.compile(r"(?:--set [\w.]+=[^ ,;]+ ?)+")


def wrong_in_typing(error: UserError, parsed: argparse.Namespace) -> Iterator[str]:
    """What would be refused of the `try`, typed behind this command."""
    if IN_TRAINING in error.fix:
        assert untaken(error.fix.partition(IN_TRAINING)[0], parsed), "it could be typed"
        return
    yield from (f"{name} is not taken" for name in untaken(error.fix, parsed))
    typed = SETTINGS.match(error.fix)
    if typed and "config" in vars(parsed):
        overrides = shlex.split(typed[0])[1::2]
        keys = {override.partition("=")[0] for override in overrides}
        others = [override for override in parsed.set if override.partition("=")[0] not in keys]
        try:
            load(parsed.config, [*others, *overrides])
        except UserError as refused:
            if any(key in refused.what for key in keys):
                yield f"{typed[0]}: {refused}"


@pytest.fixture(autouse=True)
def every_try_can_be_typed(monkeypatch):
    wrong = []

    def checked(error: UserError, parsed: argparse.Namespace) -> None:
        make_typable(error, parsed)
        wrong.extend(f"{error}: {each}" for each in wrong_in_typing(error, parsed))

    monkeypatch.setattr(command, "make_typable", checked)
    yield
    assert not wrong, "\n".join(wrong)
