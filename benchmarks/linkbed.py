"""Ranks on one machine connected by slow links, to measure the overlap of communication and computation.

Over loopback a transfer costs only processor time, so there is nothing to hide. Here each rank is a process
in a separate network namespace, on a separate processor core. Virtual links with a rate limit connect the
namespaces: a transfer takes time and hardly any computation::

    with LinkBed(ranks=2, rate="2gbit") as bed:
        results = bed.run("benchmarks.tp_overlap.rank:measure", sizes=...)

This runs ``measure(sizes=...)`` on both ranks, with a gloo process group over the link, and returns the
results by rank. Without a rate the ranks talk over loopback, otherwise unchanged. Needs Linux, root and
iproute2 (``ip``, ``tc``).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_BURST, _LATENCY = "256k", "400ms"
_WINDOW = 2**25
"""Bytes in flight between two hosts.

The system's own limit starts far smaller and grows only as fast as the receiver reads, which is late while it
computes.
"""
_NETWORK = "10.231.0"
_PREFIX = "linkbed"
_DEVICE = "slow0"


class LinkBedError(RuntimeError):
    """The links cannot be created, or a rank failed; the message states which and what to do."""


class LinkBed:
    """A few ranks and the links between them; a context manager that cleans up on exit.

    Args:
        ranks: number of processes, 2 to 16.
        rate: rate of each link in each direction, in ``tc`` notation (``2gbit``, ``400mbit``); ``None`` for
            loopback.
        cores: processor core of each rank; default: the cores available to this process, one each. Ranks may
            share a core, but their times then say nothing about overlap.
        wide: whether links carry a full window while the receiver computes, as between hosts of a cluster;
            the system's own setting suits short messages.

    Raises:
        LinkBedError: invalid ranks or rate, or fewer cores than ranks and none named; on entering: not root,
            no iproute2, or a kernel without support.
    """

    def __init__(
        self,
        ranks: int = 2,
        rate: str | None = "2gbit",
        cores: Sequence[int] | None = None,
        wide: bool = False,
    ) -> None:
        if not 2 <= ranks <= 16:
            raise LinkBedError(f"link bed: {ranks} ranks were requested; use 2 to 16")
        if rate is not None and not re.fullmatch(r"\d+(\.\d+)?[kmgt]bit", rate):
            raise LinkBedError(f"link bed: {rate!r} is not a rate; write 2gbit or 400mbit")
        available = sorted(os.sched_getaffinity(0))
        self.ranks, self.rate, self.wide = ranks, rate, wide
        if cores is None and len(available) < ranks:
            raise LinkBedError(
                f"link bed: {ranks} ranks need a core each and this process may use {len(available)}; use "
                "fewer ranks, or name the cores that they share"
            )
        self.cores = list(available[:ranks] if cores is None else cores)
        self._name = f"{_PREFIX}{os.getpid()}"
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> LinkBed:
        if self.rate is not None:
            require_tools()
            _remove_leftovers()
        try:
            self._folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="linkbed-")))
            if self.rate is not None:
                self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def _build(self) -> None:
        """Connect two ranks by one link, more ranks by one link each to a bridge; limit both ends."""
        spaces = [self._space(rank) for rank in range(self.ranks)]
        for space in spaces:
            self._add_namespace(space)
        if self.ranks == 2:
            self._link(spaces[0], _DEVICE, spaces[1])
            self._limit(spaces[0], _DEVICE)
        else:
            switch = f"{self._name}-sw"
            self._add_namespace(switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for rank, space in enumerate(spaces):
                self._link(switch, f"port{rank}", space)
                _ip("-n", switch, "link", "set", f"port{rank}", "master", "bridge")
                self._limit(switch, f"port{rank}")
        for rank, space in enumerate(spaces):
            if self.wide:
                for setting in ("tcp_rmem", "tcp_wmem"):
                    sizes = f"net.ipv4.{setting}=4096 {_WINDOW} {_WINDOW}"
                    _run("ip", "netns", "exec", space, "sysctl", "-q", "-w", sizes)
            # A single link's first end was limited above.
            if rank or self.ranks > 2:
                self._limit(space, _DEVICE)
            _ip("-n", space, "addr", "add", f"{_NETWORK}.{rank + 1}/24", "dev", _DEVICE)
            _ip("-n", space, "link", "set", "lo", "up")

    def _link(self, space: str, device: str, other: str) -> None:
        """Connect ``device`` in one namespace to the standard device in the other."""
        _ip("-n", space, "link", "add", device, "type", "veth", "peer", "name", _DEVICE, "netns", other)

    def _limit(self, space: str, device: str) -> None:
        """Bring a link's end up and limit its send rate."""
        _ip("-n", space, "link", "set", device, "up")
        limit = ("tbf", "rate", str(self.rate), "burst", _BURST, "latency", _LATENCY)
        _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", *limit)

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._cleanup.callback(_run, "ip", "netns", "delete", name, check=False)

    def _space(self, rank: int) -> str:
        return f"{self._name}-{rank}"

    def run(self, function: str, timeout_s: float = 600.0, **arguments: Any) -> list[Any]:
        """Call ``function(**arguments)`` on every rank and return the results by rank.

        Args:
            function: path ``"package.module:name"``. It runs with a gloo process group over the links, one
                torch thread, and ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` set.
            timeout_s: seconds until the ranks are terminated.
            **arguments: keyword arguments, the same for all ranks; they and the results are pickled.

        Raises:
            LinkBedError: a rank failed, with the end of its log, or took too long.
        """
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        (folder / "task").write_bytes(pickle.dumps((function, arguments)))
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(self._start(rank, folder)) for rank in range(self.ranks)]
            deadline = time.monotonic() + timeout_s
            while (running := [p for p in processes if p.poll() is None]) and time.monotonic() < deadline:
                if any(process.poll() for process in processes):
                    break  # the others would wait for it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running[0].wait(0.2)
        failed = [rank for rank in range(self.ranks) if not (folder / f"result-{rank}").exists()]
        if failed:
            words = [f"--- rank {rank}:\n{(folder / f'log-{rank}').read_text()[-3000:]}" for rank in failed]
            raise LinkBedError(
                f"link bed: {function} failed or did not finish within {timeout_s:.0f} s\n" + "\n".join(words)
            )
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(self.ranks)]

    @contextlib.contextmanager
    def _start(self, rank: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "benchmarks.linkbed", str(folder)]
        if self.rate is not None:
            command = ["ip", "netns", "exec", self._space(rank), *command]
        interface = "lo" if self.rate is None else _DEVICE
        root = str(Path(__file__).parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "GLOO_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            # A rank has one core.
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "LINKBED_CORE": str(self.cores[rank]),
        }
        with (
            open(folder / f"log-{rank}", "wb") as log,
            subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT) as process,
        ):
            try:
                yield process
            finally:
                process.kill()


def require_tools() -> None:
    """Check that this process can build links.

    Raises:
        LinkBedError: it cannot; the message names the missing requirement.
    """
    if not sys.platform.startswith("linux"):
        raise LinkBedError(f"link bed: network namespaces are Linux's, this is {sys.platform}")
    if os.geteuid() != 0:
        raise LinkBedError("link bed: network namespaces need root; run as root or in a container with root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise LinkBedError(f"link bed: {' and '.join(missing)} not found; apt-get install iproute2")


def _remove_leftovers() -> None:
    """Delete namespaces of link beds whose process was killed."""
    for line in _run("ip", "netns", "list").splitlines():
        found = re.match(rf"({_PREFIX}(\d+)-\w+)\b", line)
        if found and not Path(f"/proc/{found[2]}").exists():
            _run("ip", "netns", "delete", found[1], check=False)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise LinkBedError(
            f"link bed: `{' '.join(words)}` failed: {done.stderr.strip()}; the kernel or the container must "
            "allow network namespaces, veth, bridge and tbf"
        )
    return done.stdout


def _rank(folder: Path) -> None:
    """Run the task in a rank's process."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, {int(os.environ["LINKBED_CORE"])})  # before threads start
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    name, arguments = pickle.loads((folder / "task").read_bytes())
    module, _, attribute = name.partition(":")
    result = getattr(importlib.import_module(module), attribute)(**arguments)
    # No rank leaves while others still need its connections.
    dist.barrier()
    dist.destroy_process_group()
    # The parent only sees complete results.
    partial = folder / f"partial-{rank}"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(folder / f"result-{rank}")


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
