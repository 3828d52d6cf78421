"""Ends all processes of a run soon after one of them has ended.

Left to jax, the others would hang in a collective or be aborted. So each process holds a connection
to the coordinator (coordinator.py). A process that fails sends the reason before it ends; one that
is killed is noticed when its connection breaks. The others then end with exit code 8. A lone
process holds no connection, and `end` and `leave` do nothing.
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
from typing import Any

from spmdtrain.config.errors import ConfigError, PeerLostError, UserError
from spmdtrain.processes import coordinator, signals

KEY = "spmdtrain/lines"  # in jax's key-value store: port and token of the coordinator's news
CONNECT_SECONDS = 60
# jax aborts a process, with a C++ stack trace, after 300 seconds of waiting for the others to
# start.
START_SECONDS = 290
SILENT_SECONDS = 10  # of waiting, before a line names the missing processes
# How long a process may continue after news of another. Often all make the same mistake, and this
# lets each report it itself.
GRACE_SECONDS = 2
# The error of a collective whose other side is gone: in gloo, in NCCL, in jax's own barriers.
BROKEN = re.compile("gloo .* failed|by peer|remote process|coordination service|barrier", re.I)

_connection: socket.socket | None = None  # to the coordinator; None: a lone process, or done
_news: list[str] = []
_news_came = threading.Event()
_ending = threading.Lock()


def join(**arguments) -> None:
    """Calls `jax.distributed.initialize` with the coordinator in a separate program.

    Then connects to it. Raises ConfigError if its port cannot be reached.
    """
    import jax
    from jax._src import distributed  # its service and client have no public API, 0.10 to 0.12

    jaxlib: Any = vars(distributed)["_jax"]
    started: list[_Coordinator] = []

    def start(*arguments_of_jax, **named):
        started.append(_Coordinator(*arguments_of_jax, **named))
        return started[0]

    start_service = jaxlib.get_distributed_runtime_service
    jaxlib.get_distributed_runtime_service = start
    met = threading.Event()
    threading.Thread(target=_watch_the_start, args=(met,), name="start", daemon=True).start()
    try:
        jax.distributed.initialize(**arguments)
    finally:
        met.set()
        jaxlib.get_distributed_runtime_service = start_service

    state: Any = distributed.global_state
    if started:  # this is process 0
        state.client.key_value_set(KEY, f"{started[0].port} {started[0].token}")
    port, token = state.client.blocking_key_value_get(KEY, 1000 * CONNECT_SECONDS).split()
    host = state.coordinator_address.rpartition(":")[0].strip("[]")
    try:
        connection = socket.create_connection((host, int(port)), CONNECT_SECONDS)
    except OSError as error:
        raise ConfigError(
            f"process {state.process_id} cannot reach port {port} of {host}",
            found=error.strerror or str(error),
            fix="a network in which hosts reach all ports of each other, as collectives do",
        ) from None
    _hold(connection, token, state.process_id)


def _watch_the_start(met: threading.Event) -> None:
    """Names the processes that are missing, and ends this one in one line if they never come."""
    if met.wait(SILENT_SECONDS):
        return
    from jax._src import distributed

    state: Any = distributed.global_state
    others = f"the other processes of {state.num_processes}, at {state.coordinator_address}"
    if _has_no_address(state.coordinator_address):
        waited = f"process {state.process_id} knows no host of the name that it is to reach"
    else:
        what = f"process {state.process_id} waits for {others}"
        print(f"spmdtrain: {what}", file=sys.stderr, flush=True)
        if met.wait(START_SECONDS - SILENT_SECONDS):
            return
        waited = f"process {state.process_id} has waited {START_SECONDS} s for others"
    error = PeerLostError(
        waited,
        found=others,
        fix="the same command on all hosts, or env -u SLURM_NTASKS -u OMPI_COMM_WORLD_SIZE "
        "spmdtrain ... for one process",
    )
    print(f"spmdtrain: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def _has_no_address(address: str) -> bool:
    try:
        socket.getaddrinfo(address.rpartition(":")[0].strip("[]"), None)
    except socket.gaierror as error:
        return error.errno == socket.EAI_NONAME
    return False


def _hold(connection: socket.socket, token: str, process: int) -> None:
    """Introduces this process to the coordinator, listens to it, and registers the last word."""
    global _connection
    connection.settimeout(None)
    coordinator.keep_alive(connection)
    connection.sendall(f"{token} {process}\n".encode())
    _connection = connection
    threading.Thread(target=_listen, args=(connection,), name="peers", daemon=True).start()
    sys.excepthook = _end_uncaught
    # Registered after jax's own handler, which waits for the others, so it runs before it.
    atexit.register(_say_last, "done")


class _Coordinator:
    """The coordinator, with the interface of jax's service: jax's start function returns it."""

    def __init__(self, *arguments, **named):
        self.token = secrets.token_hex(16)
        message = json.dumps([arguments, named, self.token])
        self._process = subprocess.Popen(
            [sys.executable, "-P", coordinator.__file__, message],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        output = self._process.stdout
        assert output is not None  # it is a pipe
        answer = output.readline() or '[null, "it did not start"]'
        self.port, wrong = json.loads(answer)
        if self.port is None:
            raise ConfigError(
                f"the coordinator cannot listen at {arguments[0]}",
                found=str(wrong),
                fix="another port, e.g. 12346, on all processes",
            )

    def shutdown(self) -> None:
        assert self._process.stdin is not None  # it is a pipe
        self._process.stdin.close()
        self._process.wait()


def _listen(connection: socket.socket) -> None:
    """Waits for news of another process, then ends this one if it does not end by itself."""
    heard = b""
    with suppress(OSError):
        heard = connection.makefile("rb").readline()
    if _connection is None:  # this process is done
        return
    _news.append(_describe_news(heard.decode(errors="replace").strip()))
    _news_came.set()
    time.sleep(GRACE_SECONDS)
    if _connection is not None:
        _end_now(PeerLostError(_news[0]))


def _describe_news(news: str) -> str:
    """Describes "INDEX failed WHY" or "INDEX lost", or "" if the coordinator itself is gone."""
    process, _, last_word = news.partition(" ")
    if last_word.startswith("failed "):
        return f"process {process} failed: {last_word.removeprefix('failed ')}"
    return f"process {process or 0} was lost: killed, or its host is gone"


def _say_last(word: str) -> None:
    """Sends the last word to the coordinator; from then on its news is ignored."""
    global _connection
    connection, _connection = _connection, None
    if connection is not None:
        with suppress(OSError):
            connection.sendall(f"{word}\n".encode())


def end(error: BaseException) -> None:
    """Ends this process with `error`: shows it and tells the others. Returns if there are none.

    An error that the end of another process caused is replaced by one line about that end.
    """
    if _connection is None:
        return
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    broken = BROKEN.search(str(root))
    if broken or not isinstance(error, UserError):
        # It may be the fault of another process whose news is on its way.
        if _news_came.wait(GRACE_SECONDS):
            error = PeerLostError(_news[0])
        elif broken:
            first_line = str(root).splitlines()[0]
            error = PeerLostError("another process was lost", found=first_line[:200])
    _end_now(error)


def _end_uncaught(kind: type[BaseException], error: BaseException, trace) -> None:
    end(error)
    sys.__excepthook__(kind, error, trace)


def _end_now(error: BaseException) -> None:
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # another thread is ending the process: wait for that
    if isinstance(error, UserError):
        why = str(error)
        print(f"spmdtrain: {error}", file=sys.stderr)
    else:
        why = repr(error)
        traceback.print_exception(error)
    word = "done" if isinstance(error, PeerLostError) else f"failed {why}"
    leave(getattr(error, "exit_code", 1), word)


def leave(code: int, word: str) -> None:
    """Ends this process now, without jax's shutdown, which is a barrier. Returns if it is alone.

    `word` is the message to the coordinator: "failed WHY" or "done".
    """
    if _connection is None:
        return
    signals.note_end(code)
    _say_last(" ".join(word.split())[:1000])
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
