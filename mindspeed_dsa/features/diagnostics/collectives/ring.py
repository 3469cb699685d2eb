"""Ring of connections between ranks, whose end says on any machine that a process has ended.

A folder that all ranks share says less: not every job has one, and a lock in it speaks of processes of one
machine alone. Rank r holds a connection to rank r + 1. The kernel closes it with the process, whatever has
ended that, and its probes end it where the machine is gone. A process that is frozen or busy keeps it. What a
rank has learnt it tells rank r - 1, which tells the one before: the word reaches all that live.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Mapping
from typing import Any

_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between probes, and probes: a machine that is gone is missed after 25 s."""
_REACHED_WITHIN_S = 5.0
_TRIES = 5
_LEAVES = b"leaves\n"


class Ring:
    """Connections of one rank, to the next and from the one before.

    Args:
        store: of the job.
        job: name of the job.
        rank, ranks: this one, and how many there are.
        host, pid: where it runs, for the words of others.
    """

    def __init__(self, store: Any, job: str, rank: int, ranks: int, host: str, pid: int) -> None:
        self._next = (rank + 1) % ranks
        self._key = f"mindspeed_dsa/ring/{job}"
        self._door = socket.create_server(("", 0), family=socket.AF_INET)
        self._before: socket.socket | None = None
        self._behind: socket.socket | None = None
        self._heard = b""
        self._about = ""
        self._told: dict[str, str] = {}
        self._host, self._store, self._tries = host, store, _TRIES
        where = {"host": host, "pid": pid, "address": _address_towards(store)}
        where["port"] = self._door.getsockname()[1]
        store.set(f"{self._key}/{rank}", json.dumps(where))

    def connect(self) -> None:
        """Connect to the next rank, once it has made its first group.

        Raises:
            OSError: it cannot be reached from here.
        """
        key = f"{self._key}/{self._next}"
        # Waiting would keep the store from the main thread.
        if self._store is None or not self._store.check([key]):
            return
        where = json.loads(self._store.get(key))
        address = "127.0.0.1" if where["host"] == self._host else where["address"]
        self._tries -= 1  # an earlier session of its process may have left that address
        if not self._tries:
            self._store = None
        self._behind = socket.create_connection((address, where["port"]), timeout=_REACHED_WITHIN_S)
        self._store = None
        self._about = f"process {where['pid']} on {where['host']}"
        self._behind.setblocking(False)
        self._behind.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                self._behind.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def waited_for(self) -> list[Any]:
        """Return what a ``select`` is to wait for."""
        return [each for each in (self._door, self._behind) if each is not None]

    def listen(self, ready: Iterable[Any]) -> dict[str, str]:
        """Return what became of ranks that ended unasked, in words, by rank, as far as it is news."""
        if self._door in ready:
            self._before = self._door.accept()[0]
            self._tell()
        if self._behind is None or self._behind not in ready:
            return {}
        try:
            data = self._behind.recv(65536)
        except BlockingIOError:
            return {}
        except OSError:
            data = b""
        if not data:
            left = self._heard.endswith(_LEAVES)
            self._behind.close()
            self._behind = None
            return (
                {} if left else {str(self._next): f"{self._about} has ended, or cannot be reached any more"}
            )
        self._heard += data
        *lines, rest = self._heard.split(b"\n")
        news: dict[str, str] = {}
        for line in lines:
            if line and line + b"\n" != _LEAVES:
                news.update(json.loads(line))
        self._heard = _LEAVES if lines and lines[-1] + b"\n" == _LEAVES else rest
        return news

    def tell(self, lost: Mapping[str, str]) -> None:
        """Tell the rank before, and through it all others."""
        self._told = dict(lost)
        self._tell()

    def _tell(self) -> None:
        if self._told and self._before is not None:
            with contextlib.suppress(OSError):  # it is gone itself
                self._before.sendall(json.dumps(self._told).encode() + b"\n")

    def leave(self) -> None:
        """Close the connections: this rank leaves of its own accord."""
        if self._before is not None:
            with contextlib.suppress(OSError):
                self._before.sendall(_LEAVES)
        self.close()

    def close(self) -> None:
        """Close the connections without a word, as in a forked child, whose parent goes on."""
        for each in (self._door, self._before, self._behind):
            if each is not None:
                each.close()
        self._before = self._behind = None


def _address_towards(store: Any) -> str:
    """Return an address of this machine that others reach: the one on the way to who serves the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((getattr(store, "host", "localhost"), 9))  # sends nothing
        address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            return address
    return socket.gethostname()
