"""Python programs in separate processes that begin with torch imported.

A fresh interpreter takes seconds to import torch and Megatron's dependencies. :func:`run` and :func:`popen`
take commands as ``subprocess`` does, and run them in forks of a process that has imported those already
(``warm_server.py``). Everything else is as in a fresh interpreter: Megatron and this library are not
imported; ``sys.argv``, ``sys.path``, the environment and the streams are the command's. Tests of imports, or
of variables that torch itself reads, need a truly fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from tests.support import third_party

# Variables that libraries read when they are imported, which is in the server.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class _Server:
    def __init__(self, imported: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        # Triton reads its variable when it is imported, which is in the server, and a test may have set it.
        dropped = ("PYTHONPATH", "TRITON_INTERPRET")
        environ = {name: value for name, value in os.environ.items() if name not in dropped}
        file = Path(__file__).with_name("warm_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(file), str(theirs.fileno()), *imported],
            pass_fds=[theirs.fileno()],
            env={**environ, **_ENVIRONMENT},
        )
        theirs.close()
        self._socket = ours
        self._answers = ours.makefile("r")
        self._numbers = itertools.count()
        atexit.register(self.close)

    def ask(self, request: Mapping[str, Any], streams: Sequence[int] = ()) -> int:
        number = next(self._numbers)
        socket.send_fds(self._socket, [json.dumps({**request, "number": number}).encode()], streams)
        for line in self._answers:
            answered, answer = json.loads(line)
            if answered == number:  # an answer to a test that ran out of time
                return int(answer)
        raise RuntimeError("the server of warm processes has ended")

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
        self.process.wait(timeout=60)


_server = cache(_Server)


class Process:
    """A started program.

    Attributes:
        stdin, stdout: our ends of pipes, if requested.
    """

    def __init__(self, server: _Server, pid: int, stdin: IO[Any] | None, stdout: IO[Any] | None) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._server = server
        self.returncode: int | None = None

    def wait(self, timeout: float = 600) -> int:
        """Wait for the program; return its exit code.

        Raises:
            subprocess.TimeoutExpired: it ran longer than ``timeout`` seconds, and has been killed.
        """
        if self.returncode is None:
            clock = threading.Timer(timeout, self.kill)
            clock.start()
            try:
                self.returncode = self._server.ask({"wait": self.pid})
            except BaseException:  # the test has run out of time
                self.kill()
                raise
            finally:
                # A clock that is no longer alive has killed the program.
                in_time = clock.is_alive()
                clock.cancel()
            if not in_time:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def kill(self) -> None:
        """Kill the program."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> None:
        """Close our ends and wait for the program."""
        for end in (self.stdin, self.stdout):
            if end is not None:
                end.close()
        self.wait()


def popen(
    command: Sequence[str],
    *,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    text: bool = True,
    imported: tuple[str, ...] = third_party.NAMES,
) -> Process:
    """Do ``subprocess.Popen`` for ``[sys.executable, ...]``; streams are files, ``PIPE`` or inherited.

    ``imported`` are the modules that the program finds imported, if they are installed.
    """
    assert command[0] == sys.executable
    request = {
        "start": list(map(str, command[1:])),
        "cwd": str(cwd or Path.cwd()),
        "environ": dict(os.environ if env is None else env),
    }
    with contextlib.ExitStack() as theirs:
        sink = theirs.enter_context(open(os.devnull))
        ends: list[IO[Any] | None] = [None, None]
        streams = []
        for number, (requested, mode) in enumerate([(stdin, "w"), (stdout, "r"), (stderr, "")]):
            if requested == subprocess.PIPE:
                pair = os.pipe()
                ours, inherited = pair if mode == "r" else pair[::-1]
                ends[number] = os.fdopen(ours, mode if text else f"{mode}b")
                theirs.callback(os.close, inherited)
                streams.append(inherited)
            elif requested == subprocess.STDOUT:
                streams.append(streams[1])
            elif requested is None:
                # By default stdin is empty, and the other streams are inherited.
                streams.append(number if number else sink.fileno())
            else:
                streams.append(requested if isinstance(requested, int) else requested.fileno())
        server = _server(imported)
        return Process(server, server.ask(request, streams), *ends)


def run(
    command: Sequence[str],
    *,
    input: str = "",
    capture_output: bool = True,
    text: bool = True,
    timeout: float = 120,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Do ``subprocess.run`` for ``[sys.executable, ...]``; the output is kept as text."""
    assert capture_output
    assert text
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        stdin.write(input)
        stdin.seek(0)
        code = popen(command, stdin=stdin, stdout=out, stderr=err, cwd=cwd, env=env).wait(timeout)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(command), code, out.read(), err.read())
