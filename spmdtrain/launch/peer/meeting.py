"""Tells launchers where the others listen: a server on the first host collects their addresses.

Its port is the one after the coordinator's. A launcher's question contains its own address, and is
repeated: the first host may be replaced, and then knows nobody.
"""

import socket
import socketserver
import threading
from contextlib import suppress

from spmdtrain.config.errors import ConfigError
from spmdtrain.launch.peer.wire import read_line, send_line
from spmdtrain.processes.coordinator import ANY, ThreadServer

ASK_SECONDS = 5.0
ASK_SOON_SECONDS = 0.2  # until all are there
Addresses = dict[int, tuple[str, int]]  # of the launchers, by the number of their host


class MeetingServer(ThreadServer):
    """The server on the first host, which the others know by the name `name`."""

    allow_reuse_address = True  # the port of a launcher that has just ended

    def __init__(self, name: str, port: int, token: str):
        """Opens the port. `token` tells the launchers of this run from others."""
        self.name = name
        self.token = token
        self.addresses: Addresses = {}
        super().__init__((ANY, port), MeetingHandler)


class MeetingHandler(socketserver.StreamRequestHandler):
    """A launcher's question."""

    # The library's type does not allow for a custom server.
    server: "MeetingServer"  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self):
        token, host, port = read_line(self.rfile)
        if token != self.server.token:
            return
        # The first host may ask itself under an address that no other host can use.
        where = self.client_address[0] if int(host) else self.server.name
        self.server.addresses[int(host)] = (where, int(port))
        addresses = self.server.addresses.items()
        send_line(self.connection, [[number, *address] for number, address in addresses])


class Meeting:
    """This launcher's knowledge of all: `addresses` is the latest answer of the first host."""

    def __init__(self, name: str, port: int, token: str, host: int, hosts: int):
        """Opens the server on the first host. Raises ConfigError if its port is taken."""
        self._at = name.strip("[]"), port
        self._token = token
        self._host = host
        self._hosts = hosts
        self._over = threading.Event()
        self._server = None
        self.addresses: Addresses = {}
        if host:
            return
        try:
            self._server = MeetingServer(self._at[0], port, token)
        except OSError as error:
            raise ConfigError(
                f"the launchers of a run meet at port {port} of the first host, the one after the "
                "coordinator's",
                asked="checkpoint.memory_peer=true",
                found=error.strerror or "",
                fix="another port in SPMDTRAIN_COORDINATOR, on all hosts",
            ) from None
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def begin(self, listens: int) -> None:
        """Starts asking, and announces that this launcher listens at the port `listens`."""
        threading.Thread(target=self._ask, args=(listens,), name="meeting", daemon=True).start()

    def close(self) -> None:
        self._over.set()
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def _ask(self, listens: int) -> None:
        seconds = 0.0
        while not self._over.wait(seconds):
            with suppress(OSError), socket.create_connection(self._at, ASK_SECONDS) as connection:
                send_line(connection, [self._token, self._host, listens])
                answer = read_line(connection.makefile("rb"))
                self.addresses = {int(at): (str(name), int(port)) for at, name, port in answer}
            is_full = len(self.addresses) == self._hosts
            seconds = ASK_SECONDS if is_full else ASK_SOON_SECONDS
