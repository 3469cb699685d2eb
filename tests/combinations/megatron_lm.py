"""Jobs of ``pretrain_gpt.py`` in forks of a process that has imported Megatron-LM.

``python -m tests.combinations.megatron_lm CHECKOUT`` reads a JSON list per line from stdin, the flags of a
job, the number of its ranks and a folder. It answers each with the exit codes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspeed_dsa
from mindspeed_dsa import session
from tests.support.ports import free_port

SCRIPT = "pretrain_gpt.py"
METRICS = "metrics.jsonl"


class Jobs:
    """Client of the process that runs the jobs, one at a time.

    Args:
        checkout: folder of Megatron-LM.
    """

    def __init__(self, checkout: str) -> None:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([checkout, root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.combinations.megatron_lm", checkout],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )

    def run(self, words: Sequence[str], ranks: int, folder: Path) -> tuple[list[int], list[dict[str, Any]]]:
        """Run a job below ``folder``; return the exit codes of its ranks, and the records of its steps."""
        folder.mkdir(parents=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(words), ranks, str(folder)]) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        metrics = folder / METRICS
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        return codes, [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    """Answer the jobs on stdin."""
    checkout = sys.argv[1]
    answers, sys.stdout = sys.stdout, sys.stderr
    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):  # as in a job, compilers stay out
        runpy.run_path(os.path.join(checkout, SCRIPT), run_name="imported")
    for line in sys.stdin:
        words, ranks, folder = json.loads(line)
        port = free_port()
        forks = [_fork(checkout, words, rank, ranks, port, Path(folder)) for rank in range(ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]
        print(json.dumps(codes), file=answers, flush=True)


def _fork(checkout: str, words: Sequence[str], rank: int, ranks: int, port: int, folder: Path) -> int:
    """Start one rank of a job, and return its process id."""
    if child := os.fork():
        return child
    status = 1
    try:
        output = os.open(folder / f"rank{rank}.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if "--use-torch-fsdp2" not in words:  # which refuses one connection; the others ask for it
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        argv = [*words, "--step-metrics-file", str(folder / METRICS)]
        sys.argv = [os.path.join(checkout, SCRIPT), *argv]
        session.enable_from_argv(argv)
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except mindspeed_dsa.MindSpeedDSAError as error:
        print(error)
        status = 2
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()  # ends the process of Megatron's queue of written files
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
