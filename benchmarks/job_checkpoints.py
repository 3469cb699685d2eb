"""Seconds that saves of the example job in bf16 take, with each feature that owns optimizer state.

The job makes two steps and then saves its state repeatedly, in alternation: without checksums and manifest,
with them, and during training. Its only process gathers no state from other ranks.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.registry import Metrics
from benchmarks.spent import Spent, spent
from mindspeed_dsa.runs import manifest

_EXAMPLES = str(Path(__file__).parents[1] / "examples")
_JOB = """
--bf16 --num-layers 2 --hidden-size 1024 --ffn-hidden-size 4096 --moe-ffn-hidden-size 1024 --num-experts 2
--moe-shared-expert-intermediate-size 1024 --moe-router-topk 1 --seq-length 64 --micro-batch-size 1
--global-batch-size 1 --train-iters 2 --lr-warmup-iters 1 --eval-interval 0 --eval-iters 0 --no-save
--no-tensorboard --no-plot
""".split()
_SMALL = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --moe-ffn-hidden-size 32".split()
FEATURES = {
    "none": (),
    "reuse-fp32-param": ("--reuse-fp32-param",),
    "swap-optimizer": ("--swap-optimizer",),
    "virtual-optimizer": ("--virtual-optimizer", "all"),
    "fsdp2": ("--use-torch-fsdp2",),
}


def run_all(quick: bool) -> dict[str, Metrics]:
    """Return the job's metrics by feature."""
    if _EXAMPLES not in sys.path:
        sys.path.insert(0, _EXAMPLES)
    with tempfile.TemporaryDirectory(prefix="job-checkpoints-") as folder:
        return {name: _of(Path(folder), flags, quick) for name, flags in FEATURES.items()}


def _of(folder: Path, flags: tuple[str, ...], quick: bool) -> Metrics:
    import mindspeed_dsa
    from mindspeed_dsa import session

    argv = [*_JOB, *(_SMALL if quick else ()), *flags, "--data-cache-path", str(folder / "cache")]
    session.enable_from_argv(argv)
    try:
        from dsa_job import app, training
        from dsa_job.arguments import parse_args
        from dsa_job.tokenizers import build_tokenizer
        from dsa_job.validation import World, check, padded_vocab_size

        args, world, metrics = parse_args(argv), World.from_environment(), {}  # type: Any, Any, dict[str, Any]
        check(args, world)
        app.enable_features(args)
        args.padded_vocab_size = padded_vocab_size(args, build_tokenizer(None).vocab_size)
        training.train(
            args, on_end=lambda stepper: metrics.update(_measured(args, folder, stepper, 1 if quick else 5))
        )
        return metrics
    finally:
        mindspeed_dsa.disable()
        gc.collect()


def _measured(args: Any, folder: Path, stepper: Any, times: int) -> dict[str, Any]:
    saves = _Saves(args, folder / "saves", stepper)
    saves.at_once()  # warmup: files' pages
    rounds = []
    for _ in range(times):
        with _without_manifest():
            plain = saves.at_once()
        rounds.append((plain, saves.at_once(verify=True), saves.beside()))
    wall = statistics.median(plain.wall for plain, _, _ in rounds)
    blocked = statistics.median(blocked for _, _, blocked in rounds)
    return {
        "state_bytes": saves.size,
        "synchronous_s": wall,
        "blocked_s": blocked,
        "blocking_ratio": statistics.median(blocked / plain.wall for plain, _, blocked in rounds),
        "verify_overhead": statistics.median(listed.cpu / plain.cpu - 1 for plain, listed, _ in rounds),
    }


class _Saves:
    """Saves of a job's state after its training.

    Attributes:
        size: bytes of the latest save.
    """

    def __init__(self, args: Any, folder: Path, stepper: Any) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self.args, self.folder, self.stepper, self.size = args, folder, stepper, 0
        self.queue: Any = AsyncCallsQueue()

    def at_once(self, verify: bool = False) -> Spent:
        """Save, and wait until the tracker names the checkpoint."""
        with self._removed(), mock.patch.object(self.args, "verify_checkpoint", verify):
            return spent(lambda: self._request().execute_sync())

    def beside(self) -> float:
        """Save in another process; return the seconds that training waits."""
        with self._removed():
            blocked = spent(lambda: self.queue.schedule_async_request(self._request())).wall
            process = self.queue.async_calls[-1].async_caller.process
            while process.is_alive():
                time.sleep(0.01)
            # Training waits at the begin of a save and at its end.
            return blocked + spent(lambda: self.queue.maybe_finalize_async_calls(blocking=True)).wall

    def _request(self) -> Any:
        from dsa_job import checkpoint

        progress, stepper = checkpoint.Progress(iteration=2), self.stepper
        with stepper.complete_parameters():
            return checkpoint.save(
                self.args, self.folder, progress, stepper.model, stepper.optimizer, stepper.scheduler
            )

    @contextlib.contextmanager
    def _removed(self) -> Iterator[None]:
        try:
            yield
            (saved,) = self.folder.glob("iter_*")
            self.size = sum(file.stat().st_size for file in saved.iterdir())
        finally:
            shutil.rmtree(self.folder)


@contextlib.contextmanager
def _without_manifest() -> Iterator[None]:
    """Let the job's saves write neither checksums nor a manifest."""
    with mock.patch.object(manifest, "sums", return_value={}), mock.patch.object(manifest, "write"):
        yield
