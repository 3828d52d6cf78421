"""Copies the snapshots of this host to the next one, and keeps those of the previous host.

After the loss of a process its launcher still has its snapshots. After the loss of a host another
one replaces it, and its launcher fetches them from the next host before it starts its processes.
"""

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from spmdtrain.launch.peer.meeting import Meeting
from spmdtrain.launch.peer.wire import (
    read_line,
    receive,
    send,
    send_line,
)
from spmdtrain.launch.place import Place
from spmdtrain.launch.snapshot_memory import HostMemory
from spmdtrain.processes.coordinator import ANY, ThreadServer, keep_alive
from spmdtrain.processes.snapshots.slot import Head, Slot, newest_of

KEEP, GIVE = "keep", "give"
KEPT = "kept"
POLL_SECONDS = 0.005
AGAIN_SECONDS = 0.5
CONNECT_SECONDS = 5.0
SILENT_SECONDS = 120.0  # of a connection, before it counts as broken
FETCH_SECONDS = 60.0  # for the next host to come up


class KeeperServer(ThreadServer):
    """A server that keeps the snapshots of the previous host, and gives them back."""

    def __init__(self, token: str):
        """Opens any free port. `token` tells the launchers of this run from others."""
        self.token = token
        self.kept = HostMemory()
        self.changing = threading.Lock()
        super().__init__((ANY, 0), KeeperHandler)


class KeeperHandler(socketserver.StreamRequestHandler):
    """A connection of the previous host: requests, one after another."""

    # The library's type does not allow for a custom server.
    server: "KeeperServer"  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self):
        keep_alive(self.connection)
        if read_line(self.rfile) != self.server.token:
            return
        while True:
            verb, process, *facts = read_line(self.rfile)
            with self.server.changing:
                slots = self.server.kept.slots(int(process))
                if verb == KEEP:
                    self._keep(slots, Head(*map(int, facts)))
                else:
                    self._give(slots)

    def _keep(self, slots: list[Slot], head: Head) -> None:
        newest = newest_of(slots)
        spare = next(slot for slot in slots if slot is not newest)
        is_whole = receive(self.rfile, spare, head)
        send_line(self.connection, KEPT if is_whole else "not whole")

    def _give(self, slots: list[Slot]) -> None:
        whole = [(slot, head) for slot in slots if (head := slot.head())]
        send_line(self.connection, [[*head] for _, head in whole])
        for slot, head in whole:
            send(self.connection, slot, head)


class Peer:
    """The next host's copies of the snapshots that `processes` leave in `memory`.

    Use it as a context. `place` is this host's place among several.
    """

    def __init__(self, place: Place, token: str, memory: HostMemory, processes: Sequence[int]):
        """Raises ConfigError if the launchers cannot meet."""
        assert place.coordinator is not None  # there are several hosts
        name, _, port = place.coordinator.rpartition(":")
        self._next = (place.host + 1) % place.hosts
        self._token = token
        self._memory = memory
        self._processes = processes
        for process in processes:
            memory.slots(process)  # before other threads ask
        self._over = threading.Event()
        self._meeting = Meeting(name, int(port) + 1, token, place.host, place.hosts)
        self._keeper = KeeperServer(token)

    def __enter__(self) -> "Peer":
        threading.Thread(target=self._keeper.serve_forever, daemon=True).start()
        self._meeting.begin(self._keeper.server_address[1])
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._meeting.close()
        self._keeper.shutdown()
        self._keeper.server_close()

    def fetch(self, gives_up: Callable[[], bool] = lambda: False) -> bool:
        """Fetches this host's snapshots from the next host, and returns True if there were any.

        It waits for that host for FETCH_SECONDS, or until `gives_up`. Then it starts to send.
        """
        is_whole = False
        deadline = time.monotonic() + FETCH_SECONDS
        while time.monotonic() < deadline and not gives_up():
            with suppress(OSError), self._connection() as connection:
                source = connection.makefile("rb")
                is_whole = all([self._fetched(connection, source, at) for at in self._processes])
                break
            time.sleep(AGAIN_SECONDS)
        threading.Thread(target=self._send, name="snapshots", daemon=True).start()
        return is_whole

    def _fetched(self, connection: socket.socket, source, process: int) -> bool:
        send_line(connection, [GIVE, process])
        heads = [Head(*facts) for facts in read_line(source)]
        slots = self._memory.slots(process)
        for slot, head in zip(slots, heads, strict=False):
            if receive(source, slot, head):
                slot.arrived = head.number
        return bool(heads)

    def _connection(self) -> socket.socket:
        """Returns a connection to the next host. Raises OSError if it is not there."""
        address = self._meeting.addresses.get(self._next)
        if address is None:
            raise ConnectionError("the next host is not there yet")
        connection = socket.create_connection(address, CONNECT_SECONDS)
        connection.settimeout(SILENT_SECONDS)
        keep_alive(connection)
        send_line(connection, self._token)
        return connection

    def _send(self) -> None:
        """Sends new snapshots. After a reconnection the host may be another one, without copies."""
        while not self._over.wait(AGAIN_SECONDS):
            with suppress(OSError), self._connection() as connection:
                sent: dict[int, int] = {}
                source = connection.makefile("rb")
                while not self._over.wait(POLL_SECONDS):
                    for process in self._processes:
                        self._send_newest(connection, source, process, sent)

    def _send_newest(
        self, connection: socket.socket, source, process: int, sent: dict[int, int]
    ) -> None:
        slot = newest_of(self._memory.slots(process))
        head = slot.head() if slot else None
        if slot is None or head is None or sent.get(process) == head.number:
            return
        send_line(connection, [KEEP, process, *head])
        send(connection, slot, head)
        if read_line(source) == KEPT:
            sent[process] = head.number
            if slot.head() == head:
                slot.arrived = head.number
