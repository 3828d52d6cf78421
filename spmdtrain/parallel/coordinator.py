"""The coordinator of a run of several processes: process 0 starts it, and it outlives process 0.

It is jax's coordination service and, beside it, a line to each process, by which all learn how one
of them ended. jax aborts every process whose coordinator is gone; if this were part of process 0,
its death would be their abort.

A process says "TOKEN INDEX", and at its end "done", or "failed WHY", or nothing. Unless it is
"done" the others are told "INDEX failed WHY", or "INDEX lost"; the first such news also to those
who come later.
"""

import json
import os
import signal
import socket
import socketserver
import sys
import threading

# For the others to hear of the end of process 0; not longer, as its port may be wanted again.
LINGER_SECONDS = 10


class Lines(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024  # all processes call at once
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, token: str):
        self.token, self.news = token, ""
        self.open: dict[str, socket.socket] = {}
        self.changed = threading.Condition()
        super().__init__(("", 0), Line)

    def server_bind(self):
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, *_):
        """A connection that breaks is news by itself; a stranger's is none."""


class Line(socketserver.StreamRequestHandler):
    def handle(self):
        token, _, process = self.rfile.readline(200).decode().strip().partition(" ")
        if token != self.server.token:
            return
        keep_alive(self.connection)
        with self.server.changed:
            self.server.open[process] = self.connection
            if self.server.news:
                self.connection.sendall(self.server.news.encode())
        said = "lost"
        try:
            said = self.rfile.readline().decode().strip() or said
        finally:
            with self.server.changed:
                del self.server.open[process]
                if said != "done":
                    self._tell(f"{process} {said}\n")
                self.server.changed.notify_all()

    def _tell(self, news: str):
        self.server.news = self.server.news or news
        for other in self.server.open.values():
            try:
                other.sendall(news.encode())
            except OSError:
                continue


def keep_alive(line: socket.socket) -> None:
    """The kernel notices in 20 seconds that a host is gone; a busy Python would answer too late."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def main() -> None:
    """Says the port of its lines once all is there; ends after its standard input does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for process 0, which says when it is over
        signal.signal(number, signal.SIG_IGN)
    arguments, named, token = json.loads(sys.argv[1])
    from jaxlib import _jax

    try:
        service = _jax.get_distributed_runtime_service(*arguments, **named)
        lines = Lines(token)
    except Exception as error:  # jaxlib raises several kinds; process 0 says whichever it was
        print(json.dumps([None, str(error)]), flush=True)
        return
    threading.Thread(target=lines.serve_forever, daemon=True).start()
    print(json.dumps([lines.server_address[1], ""]), flush=True)
    sys.stdin.read()
    with lines.changed:
        lines.changed.wait_for(lambda: not lines.open, LINGER_SECONDS)
    service.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
