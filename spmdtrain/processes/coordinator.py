"""Runs the coordinator of a multi-process run: a program that process 0 starts and that outlives
it.

It is jax's coordination service plus one connection to each process, through which all of them
learn how one of them ended. jax aborts every process whose coordinator is gone: if this were part
of process 0, the death of process 0 would abort them all.

The protocol is lines of text. A process sends "TOKEN INDEX" once it has connected. At its end it
sends "done" or "failed WHY", or nothing if it was killed. Unless it sent "done", the others receive
"INDEX failed WHY" or "INDEX lost". Processes that connect later receive the first such news.
"""

import json
import os
import signal
import socket
import socketserver
import sys
import threading

# How long the other processes have to receive the news that process 0 has ended. No longer, because
# a new run may want the port.
LINGER_SECONDS = 10
ANY = ""  # the address of a server that all interfaces reach


class ThreadServer(socketserver.ThreadingTCPServer):
    """A server that hosts reach with or without IPv6.

    Each connection is handled in a thread. A broken one prints no traceback: its handler, or the
    program at the other end, deals with it.
    """

    daemon_threads = True
    request_queue_size = 1024  # all processes may connect at the same time
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self):
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request, client_address) -> None:
        """Prints nothing."""


class NewsServer(ThreadServer):
    """A server on any free port that handles each process's connection in a thread."""

    def __init__(self, token: str):
        """Opens a port. `token` is the secret that tells processes of this run from strangers."""
        self.token = token
        self.news = ""  # the first
        self.open: dict[str, socket.socket] = {}  # by process index
        self.changed = threading.Condition()  # guards `news` and `open`
        super().__init__((ANY, 0), NewsHandler)


class NewsHandler(socketserver.StreamRequestHandler):
    """The connection of one process."""

    # The library's type does not allow for a custom server.
    server: "NewsServer"  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self):
        token, _, process = self.rfile.readline(200).decode().strip().partition(" ")
        if token != self.server.token:
            return
        keep_alive(self.connection)
        with self.server.changed:
            self.server.open[process] = self.connection
            if self.server.news:
                self.connection.sendall(self.server.news.encode())
        last_word = "lost"
        try:
            last_word = self.rfile.readline().decode().strip() or last_word
        finally:
            with self.server.changed:
                del self.server.open[process]
                if last_word != "done":
                    self._tell_others(f"{process} {last_word}\n")
                self.server.changed.notify_all()

    def _tell_others(self, news: str):
        self.server.news = self.server.news or news
        for other in self.server.open.values():
            try:
                other.sendall(news.encode())
            except OSError:
                continue


def keep_alive(connection: socket.socket) -> None:
    """Makes the kernel notice within 20 seconds that the other side's host is gone.

    (A heartbeat of our own would be late whenever Python is busy.)
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def main() -> None:
    """Serves until standard input ends, that is, until process 0 is done or dead.

    Prints [port of the news server, ""] as JSON once everything is up, or [null, what went wrong].
    """
    # A terminal sends these to all its programs. Only process 0 decides when the run is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    arguments, named, token = json.loads(sys.argv[1])
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  it is compiled

    try:
        service = _jax.get_distributed_runtime_service(*arguments, **named)
        server = NewsServer(token)
    except Exception as error:  # jaxlib raises several kinds; process 0 reports whichever it was
        print(json.dumps([None, str(error)]), flush=True)
        return
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps([server.server_address[1], ""]), flush=True)
    sys.stdin.read()
    with server.changed:
        server.changed.wait_for(lambda: not server.open, LINGER_SECONDS)
    service.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
