from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]

TINY = """
--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --q-lora-rank 16
--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --dsa-indexer-n-heads 8
--dsa-indexer-head-dim 8 --dsa-indexer-topk 8 --seq-length 32 --num-experts 2 --moe-ffn-hidden-size 16
--moe-router-topk 1 --moe-shared-expert-intermediate-size 16 --micro-batch-size 1 --global-batch-size 2
--train-iters 6 --lr-warmup-iters 1 --eval-interval 3 --eval-iters 1 --save-interval 2 --log-interval 1
--no-tensorboard --no-plot
""".split()


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of small texts with structure, so that a loss can fall."""
    folder = tmp_path_factory.mktemp("text")
    chance = random.Random(0)
    words = ["if", "the", "model", "learns", "this", "its", "loss", "falls", "and", "we", "stop"]
    for number in range(48):
        lines = (" ".join(chance.choices(words, k=8)) for _ in range(20))
        (folder / f"{number:02}.txt").write_text("\n".join(lines) + "\n")
    return folder


@dataclass
class Finished:
    """A job that has ended."""

    code: int
    output: str


class JobServer:
    """Server that starts jobs in forked children of a process with everything imported."""

    def __init__(self, text: Path, scratch: Path) -> None:
        self._text, self._scratch, self._count = text, scratch, 0
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = warm.popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
        )

    def arguments(self, output_dir: Path, *more: str) -> list[str]:
        cache = str(self._scratch / "data-cache")
        where = ["--output-dir", str(output_dir), "--data", str(self._text), "--data-cache-path", cache]
        return [*TINY, *where, *more]

    def start(
        self,
        output_dir: Path,
        *more: str,
        fault: str | None = None,
        ranks: int = 1,
        while_running: Callable[[Sequence[int], Path], None] | None = None,
    ) -> list[Finished]:
        """Run a job on ``ranks`` ranks, call ``while_running(pids, output of rank 0)``, and wait."""
        self._count += 1
        outputs = [self._scratch / f"job-{self._count}-{rank}.txt" for rank in range(ranks)]
        pids = []
        port = str(free_port())
        for rank, output in enumerate(outputs):
            output.touch()
            environ: dict[str, str] = {}
            if ranks > 1:
                environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            job = {"argv": self.arguments(output_dir, *more), "environ": environ, "fault": fault}
            pids.append(self._ask({**job, "output": str(output)})["pid"])
        if while_running is not None:
            while_running(pids, outputs[0])
        codes = self._ask(None)["codes"]
        return [
            Finished(codes[str(pid)], output.read_text()) for pid, output in zip(pids, outputs, strict=True)
        ]

    def run(self, output_dir: Path, *more: str, **options: Any) -> Finished:
        return self.start(output_dir, *more, **options)[0]

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the job server has ended"
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=300)


@pytest.fixture(scope="session")
def jobs(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    server = JobServer(text_folder, tmp_path_factory.mktemp("jobs"))
    yield server
    server.close()


def records(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def results(run: Path) -> list[tuple[Any, ...]]:
    """Return the values that a resumed run must repeat bit for bit."""
    keys = ("step", "lm_loss", "indexer_loss", "grad_norm")
    return [tuple(record[key] for key in keys) for record in records(run)]


def wait_for(happened: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
