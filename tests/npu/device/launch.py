"""Start ranks of a job on the stand-in, one process each, and wait for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.npu.device import libraries
from tests.support.ports import free_port

ROOT = Path(__file__).parents[3]
_LIMIT = 300  # seconds


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        codes: exit status of each rank.
        output: both outputs of each rank.
    """

    codes: tuple[int, ...]
    output: tuple[str, ...]

    def require_success(self) -> Ended:
        """Return the job itself.

        Raises:
            AssertionError: a rank failed; the message has the end of its output.
        """
        failed = [rank for rank, code in enumerate(self.codes) if code]
        assert not failed, f"ranks {failed} failed\n" + "\n".join(
            f"rank {rank}: {_readable(self.output[rank])}" for rank in failed[:2]
        )
        return self


def _readable(output: str) -> str:
    """The end of an output, without torch's list of an operator's kernels."""
    return "\n".join(line for line in output.splitlines() if "registered at" not in line)[-3000:]


def environment(devices: int, folder: Path | None = None) -> dict[str, str]:
    """Return the variables that a process needs to find ``devices`` NPUs.

    Args:
        devices: number of NPUs.
        folder: for HCCL's messages; None where there is one rank.
    """
    libs = str(libraries.build())
    path = [libs, *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))]
    found = {
        "LD_LIBRARY_PATH": os.pathsep.join(dict.fromkeys(path)),
        "STAND_IN_NPUS": str(devices),
        "ASCEND_GLOBAL_LOG_LEVEL": "3",
        "TASK_QUEUE_ENABLE": "0",  # launches in the calling thread, where the mode is
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        # CPU kernels make and drop large tensors: pages that go back to the system are a third of their time.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_ARENA_MAX": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return found if folder is None else {**found, "STAND_IN_HCCL": str(folder)}


def run(
    script: Path,
    arguments: Sequence[object] = (),
    ranks: int = 1,
    variables: Mapping[str, str] | None = None,
    limit: float = _LIMIT,
    stand_in: bool = True,
    folder: Path | None = None,
) -> Ended:
    """Run a script in ``ranks`` processes with torchrun's variables; a rank that is killed has status -9.

    Args:
        script: path of a Python file.
        arguments: for the script, the same for all ranks.
        ranks: number of processes, each with an NPU of its own.
        variables: more of the environment.
        limit: seconds until all ranks are killed.
        stand_in: False runs the script without NPUs, for what is compared with them.
        folder: working directory of the ranks; this process' own by default.
    """
    python = [sys.executable, "-W", "ignore", *(("-m", "tests.npu.device") if stand_in else ())]
    command = [str(word) for word in (*python, script, *arguments)]
    port = str(free_port())
    with tempfile.TemporaryDirectory(prefix="stand-in-", dir=_memory_folder()) as name, ExitStack() as stack:
        messages = Path(name)
        common = {
            **os.environ,
            **environment(ranks if stand_in else 0, messages),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        outputs = [messages / f"output{rank}" for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                command,
                cwd=folder,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **(variables or {})},
                stdout=stack.enter_context(output.open("wb")),
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        codes = _wait(processes, limit)
        return Ended(codes, tuple(output.read_text("utf-8", "replace") for output in outputs))


def _wait(processes: list[subprocess.Popen[bytes]], limit: float) -> tuple[int, ...]:
    """Wait for all; a rank that fails takes the others with it, which would wait for it."""
    deadline = time.monotonic() + limit
    try:
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes) and time.monotonic() < deadline - 15:
                deadline = time.monotonic() + 10
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return tuple(process.poll() if process.poll() is not None else -9 for process in processes)  # type: ignore[misc]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
