"""A user without HOME and without an entry in /etc/passwd, as in a container under any user id."""

import os
import pwd
import re
from pathlib import Path

import spmdtrain
from spmdtrain.running.report import wandb_sink

# These raise where there is no home or no name; os.path.expanduser gives the path back.
NEEDS_A_HOME = re.compile(r"Path\.home\(|\.expanduser\(\)|getuser\(|getpw\w+\(|getlogin\(")


def test_no_key_is_found_where_there_is_no_home(monkeypatch):
    def unknown(_):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert os.path.expanduser("~/.netrc") == "~/.netrc", "there is no home"
    assert wandb_sink._wandb_mode() == "offline"


def test_nothing_needs_a_home():
    files = Path(spmdtrain.__file__).parent.rglob("*.py")
    assert [str(f) for f in files if NEEDS_A_HOME.search(f.read_text(encoding="utf-8"))] == []
