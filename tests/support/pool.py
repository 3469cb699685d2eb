"""Reusable processes that run the ranks of a distributed job.

Starting Python, torch and Megatron takes longer than most cases. One process has imported them
(``pool_server.py``); a pool forks up to ``size`` workers from it when they are first needed and keeps them::

    results = pool.run("tests.support.example_job:train", world_size=4, timeout_s=120, argv=[...])

runs ``train(argv=[...])`` from module ``tests.support.example_job`` in four processes and returns the four
results, in the order of their ranks. In each process

* a gloo process group over these ranks exists already, its keys separate from other cases', and ``RANK``,
  ``WORLD_SIZE`` and ``LOCAL_RANK`` are set as torchrun sets them;
* torch uses one thread;
* nothing of an earlier case is left: Megatron's groups, buffers, trackers and generators, the features of
  ``mindspeed_dsa`` and the process group are gone (``worker.forget_everything``).

Arguments and results are pickled, so the function is given by a dotted path, and results are plain data,
arrays or tensors on the CPU. When a rank raises, dies or does not answer in time, the case fails with
:class:`CaseError`. It has the traceback of every rank that raised, the Python stack of every rank that hangs,
and the last lines that each of them printed. The workers are then replaced, so the next case starts afresh.

The fixture ``pool`` is one pool for all tests that a pytest process runs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import connection
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support import warm, worker

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting devices leaves CUDA usable after a fork
    "PYTHONUNBUFFERED": "1",
}
_GRACE_S = 10.0  # for the other ranks to answer after a failure
_LOG_TAIL = 2000  # characters
_CRASH = "Fatal Python error"  # begins the report of faulthandler


class CaseError(Exception):
    """A case failed on a rank; the message has the state of every rank."""


class _Server:
    """Process from which all pools of this process fork their workers."""

    def __init__(self) -> None:
        paths = os.pathsep.join(filter(None, sys.path))
        self._process = warm.popen(
            [sys.executable, "-m", "tests.support.pool_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": paths},
        )

    def ask(self, **request: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server of the pool has ended"
        return int(answer)


_server = cache(_Server)


@dataclass
class _Worker:
    pid: int
    pipe: Connection
    log: Path
    log_start: int = 0
    exit_code: int | None = None

    def end(self) -> int:
        """Wait until the worker has exited; return its exit code."""
        if self.exit_code is None:
            self.exit_code = _server().ask(wait=self.pid)
        return self.exit_code

    def printed(self) -> str:
        """Return the last part of the worker's output in this case."""
        with open(self.log, "rb") as file:
            file.seek(self.log_start)
            text = file.read().decode(errors="replace").strip()
        if (crash := text.rfind(_CRASH)) >= 0:
            # The innermost frames come first.
            return text[crash:][:_LOG_TAIL]
        return text if len(text) <= _LOG_TAIL else "... " + text[-_LOG_TAIL:]


class WorkerPool:
    """Up to ``size`` reusable worker processes; a context manager.

    Args:
        size: largest world size for :meth:`run`.
    """

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._store: dist.TCPStore | None = None
        self._workers: list[_Worker] = []
        self._folder = Path(tempfile.mkdtemp(prefix="worker-pool-"))
        self._count = itertools.count()
        self._baselines: dict[bytes, list[Any]] = {}

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, function: str, world_size: int, *, timeout_s: float = 240.0, **arguments: Any) -> list[Any]:
        """Call ``function(**arguments)`` on ``world_size`` ranks and return their results by rank.

        Args:
            function: path ``"package.module:name"``, importable in a fresh process.
            world_size: number of ranks, at most ``size``.
            timeout_s: seconds until ranks without an answer count as hanging.
            **arguments: keyword arguments, the same for every rank; ``torch.distributed`` gives the rank.

        Raises:
            CaseError: a rank raised, died or hung; the workers have been replaced.
            ValueError: the pool has fewer workers than ranks.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"this pool has {self.size} workers at most; {world_size} ranks were asked for")
        self._start(world_size)
        workers = self._workers[:world_size]
        number = next(self._count)
        for rank, process in enumerate(workers):
            # A report shows only the output of this case.
            process.log_start = process.log.stat().st_size
            task = worker.Task(function, arguments, rank, world_size, self._port, f"case-{number}")
            with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed below
                process.pipe.send_bytes(pickle.dumps(task))
        answers, silent = self._collect(workers, timeout_s)
        bad = [rank for rank, answer in answers.items() if answer.failure is not None]
        if not bad and not silent:
            return [answers[rank].result for rank in range(world_size)]
        report = _report(function, workers, answers, silent, timeout_s)
        self._stop()
        raise CaseError(report)

    def baseline(self, function: str, world_size: int, **arguments: Any) -> list[Any]:
        """Call :meth:`run` once for all tests that compare with the same run; results must not be changed."""
        key = pickle.dumps((function, world_size, sorted(arguments.items())))
        if key not in self._baselines:
            self._baselines[key] = self.run(function, world_size, **arguments)
        return self._baselines[key]

    def close(self) -> None:
        """End all workers and remove their files."""
        self._stop()
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, count: int) -> None:
        while len(self._workers) < count:
            log = self._folder / f"worker-{next(self._count)}.log"
            log.touch()
            with Listener(family="AF_UNIX") as door:
                pid = _server().ask(address=door.address, log=str(log))
                self._workers.append(_Worker(pid, door.accept(), log))

    @property
    def _port(self) -> int:
        """Port of this process's store, which serves all cases."""
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def _stop(self) -> None:
        for process in self._workers:
            process.pipe.close()  # an idle worker ends by itself
        for process in self._workers:
            if process.exit_code is None:
                os.kill(process.pid, signal.SIGKILL)
                process.end()
        self._workers = []

    def _collect(
        self, workers: Sequence[_Worker], timeout_s: float
    ) -> tuple[dict[int, worker.Answer], dict[int, str]]:
        """Return answers by rank in order of arrival, and the reasons of ranks without an answer."""
        answers: dict[int, worker.Answer] = {}
        silent: dict[int, str] = {}
        waiting = {each.pipe: rank for rank, each in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    silent[rank] = f"died with exit code {workers[rank].end()}"
                if rank in silent or answers[rank].failure is not None:
                    # The other ranks wait in vain for the failed one.
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        for rank in waiting.values():
            silent[rank] = "did not answer in time; its Python stack is below"
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[rank].pid, signal.SIGUSR1)  # faulthandler prints the stack
        if waiting:
            # Give faulthandler time to print.
            time.sleep(1)
        return answers, silent


def _report(
    function: str,
    workers: Sequence[_Worker],
    answers: dict[int, worker.Answer],
    silent: dict[int, str],
    timeout_s: float,
) -> str:
    lines = [f"{function} on {len(workers)} ranks failed (timeout {timeout_s:.0f} s)"]
    for rank, answer in answers.items():
        if answer.failure is not None:
            lines += [f"--- rank {rank} raised:", answer.failure.rstrip()]
    lines += [f"--- rank {rank} {what}" for rank, what in silent.items()]
    for rank, each in enumerate(workers):
        if text := each.printed():
            lines += [f"--- rank {rank} printed:", text]
    return "\n".join(lines)
