"""How one process of several ends: with its own line and code; and the others, soon after it.

Left to jax the others hang in a collective, or are aborted. So each holds a line to the coordinator
(coordinator.py): one that fails says why before it ends, one that is killed is missed at once, and
the others end with exit code 8.
"""

import atexit
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress

from spmdtrain.config.errors import ConfigError, PeerLostError, UserError
from spmdtrain.parallel import coordinator

KEY = "spmdtrain/lines"  # of jax's key-value store: port and token of the coordinator's lines
CONNECT_SECONDS = 60
GRACE_SECONDS = 2  # the same mistake is often that of all: each may say it itself
# What a collective says whose other side is gone: of gloo, of NCCL, of jax's own barriers.
BROKEN = re.compile("gloo .* failed|by peer|remote process|coordination service|barrier", re.IGNORECASE)

_line: socket.socket | None = None  # to the coordinator; None: this process is alone
_news: list[str] = []
_told = threading.Event()
_ending = threading.Lock()


def join(**arguments) -> None:
    """`jax.distributed.initialize`, with the coordinator as a program of its own, and a line."""
    import jax
    from jax._src import distributed  # its service and client have no public way, 0.10 to 0.12

    started: list[_Coordinator] = []

    def start(*given, **named):
        started.append(_Coordinator(*given, **named))
        return started[0]

    start_service = distributed._jax.get_distributed_runtime_service
    distributed._jax.get_distributed_runtime_service = start
    try:
        jax.distributed.initialize(**arguments)
    finally:
        distributed._jax.get_distributed_runtime_service = start_service
    state = distributed.global_state
    if started:
        state.client.key_value_set(KEY, f"{started[0].port} {started[0].token}")
    port, token = state.client.blocking_key_value_get(KEY, 1000 * CONNECT_SECONDS).split()
    host = state.coordinator_address.rpartition(":")[0].strip("[]")
    try:
        line = socket.create_connection((host, int(port)), CONNECT_SECONDS)
    except OSError as error:
        raise ConfigError(
            f"process {state.process_id} cannot reach port {port} of {host}",
            found=error.strerror or str(error),
            fix="a network in which hosts reach all ports of each other, as collectives do",
        ) from None
    _hold(line, token, state.process_id)


def _hold(line: socket.socket, token: str, process: int) -> None:
    global _line
    line.settimeout(None)
    coordinator.keep_alive(line)
    line.sendall(f"{token} {process}\n".encode())
    _line = line
    threading.Thread(target=_listen, args=(line,), name="peers", daemon=True).start()
    sys.excepthook = _uncaught
    atexit.register(_say, "done")  # runs before jax's own, which waits for the others


class _Coordinator:
    """Stands where jax expects its service."""

    def __init__(self, *arguments, **named):
        self.token = secrets.token_hex(16)
        said = json.dumps([arguments, named, self.token])
        self._process = subprocess.Popen(
            [sys.executable, "-P", coordinator.__file__, said],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        answer = self._process.stdout.readline() or '[null, "it did not start"]'
        self.port, wrong = json.loads(answer)
        if self.port is None:
            raise RuntimeError(f"the coordinator of {arguments[0]}: {wrong}")

    def shutdown(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def _listen(line: socket.socket) -> None:
    """Waits for news of another process, and ends this one if it does not end by itself."""
    heard = b""
    with suppress(OSError):
        heard = line.makefile("rb").readline()
    if _line is None:  # this process is done
        return
    _news.append(_meant(heard.decode(errors="replace").strip()))
    _told.set()
    time.sleep(GRACE_SECONDS)
    if _line is not None:
        _end(PeerLostError(_news[0]))


def _meant(news: str) -> str:
    process, _, said = news.partition(" ")
    if said.startswith("failed "):
        return f"process {process} failed: {said.removeprefix('failed ')}"
    return f"process {process or 0} was lost: killed, or its host is gone"


def _say(word: str) -> None:
    """The last word to the coordinator; from then on its news is none of ours."""
    global _line
    line, _line = _line, None
    if line is not None:
        with suppress(OSError):
            line.sendall(f"{word}\n".encode())


def end(error: BaseException) -> None:
    """Ends this process of several: `error` is shown and told to the others. Alone: returns.

    An error that comes of another process's end is shown as that, in one line.
    """
    if _line is None:
        return
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    broken = BROKEN.search(str(root))
    if broken or not isinstance(error, UserError):  # it may fail because of another process
        if _told.wait(GRACE_SECONDS):
            error = PeerLostError(_news[0])
        elif broken:
            error = PeerLostError("another process was lost", found=str(root).splitlines()[0][:200])
    _end(error)


def _uncaught(kind: type[BaseException], error: BaseException, trace) -> None:
    end(error)
    sys.__excepthook__(kind, error, trace)


def _end(error: BaseException) -> None:
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # another thread is at it
    if isinstance(error, UserError):
        print(f"spmdtrain: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    why = str(error) if isinstance(error, UserError) else repr(error)
    word = "done" if isinstance(error, PeerLostError) else f"failed {why}"
    leave(getattr(error, "exit_code", 1), word)


def leave(code: int, word: str) -> None:
    """Ends this process of several now, without jax's shutdown, a barrier. Alone: returns.

    `word`: what the coordinator is told, "failed WHY" or "done".
    """
    if _line is None:
        return
    _say(" ".join(word.split())[:1000])
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
