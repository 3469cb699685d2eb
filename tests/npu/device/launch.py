"""Launcher of a job's ranks on the stand-in, one process each; waits for all of them."""

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
    """Result of a job.

    Attributes:
        codes: exit status of each rank.
        output: stdout and stderr of each rank.
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
    """Return the end of an output, without torch's list of an operator's kernels."""
    return "\n".join(line for line in output.splitlines() if "registered at" not in line)[-3000:]


def environment(devices: int, folder: Path | None = None) -> dict[str, str]:
    """Return the variables that a process needs to find ``devices`` NPUs.

    Args:
        devices: number of NPUs.
        folder: folder for HCCL's messages; None for a single rank.
    """
    libs = str(libraries.build())
    path = [libs, *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))]
    variables = {
        "LD_LIBRARY_PATH": os.pathsep.join(dict.fromkeys(path)),
        "STAND_IN_NPUS": str(devices),
        "ASCEND_GLOBAL_LOG_LEVEL": "3",
        "TASK_QUEUE_ENABLE": "0",  # launch in the calling thread, which has the mode
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        # CPU kernels allocate and free large tensors: returning pages to the system takes a third of their
        # time.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_ARENA_MAX": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return variables if folder is None else {**variables, "STAND_IN_HCCL": str(folder)}


def run(
    script: Path,
    arguments: Sequence[object] = (),
    ranks: int = 1,
    variables: Mapping[str, str] | None = None,
    limit: float = _LIMIT,
    stand_in: bool = True,
    folder: Path | None = None,
) -> Ended:
    """Run a script in ``ranks`` processes with torchrun's variables; a killed rank has status -9.

    Args:
        script: path of a Python file.
        arguments: script's arguments, the same for all ranks.
        ranks: number of processes, each with its own NPU.
        variables: additional environment variables.
        limit: seconds until all ranks are killed.
        stand_in: whether there are NPUs; False for jobs to compare with.
        folder: working directory of the ranks; default: this process's.
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
    """Wait for all ranks; a failed rank ends the others, which would wait for it."""
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
