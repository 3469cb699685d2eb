"""Seconds that saves of Megatron's distributed checkpoints take from training, with and without a manifest.

The state is that of mixed precision with Adam: weights in bf16, master weights and both moments in float32.
Asynchronous saves are written by a process that is forked, as ``--async-save`` does it by default.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.registry import Metrics
from mindspeed_dsa import log
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.checkpoints.whole.feature import Options
from mindspeed_dsa.features.checkpoints.whole.saving import Work, begin, finish, listed_at_the_end
from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.whole_checkpoints import TRACKER

_PARTS = 8
_BYTES = 2 + 3 * 4
"""Bytes of one parameter's state: in bf16, and three times in fp32."""


def run(device: str, quick: bool = False, size: str = "1") -> Metrics:
    """All metrics of the case.

    Args:
        device: not used: the state is on the host.
        quick: a state too small to say anything.
        size: GB of the state.
    """
    import mindspeed_dsa

    parameters = int((0.002 if quick else float(size)) * 1e9) // _BYTES // _PARTS
    with (
        mindspeed_dsa.enabled(mindspeed_platform="cpu"),
        tempfile.TemporaryDirectory(prefix="checkpoints-") as name,
    ):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        megatron = Megatron()
        megatron("core.parallel_state").initialize_model_parallel()
        try:
            return _measured(Saves(Path(name), parameters, megatron), 1 if quick else 7)
        finally:
            megatron("core.parallel_state").destroy_model_parallel()
            dist.destroy_process_group()


class Saves:
    """Saves of one state, timed.

    Attributes:
        work: what whole-checkpoints knows.
    """

    def __init__(self, folder: Path, parameters: int, megatron: Megatron) -> None:
        self.folder, self.megatron = folder, megatron
        options = Options(verify=True, save=folder)
        self.work = Work(Context("whole-checkpoints", options, megatron, log.get("whole-checkpoints")))
        sharded: Any = megatron("core.dist_checkpointing.mapping").ShardedTensor
        kinds = ("weight", torch.bfloat16), ("master", torch.float32), ("mean", torch.float32)
        self.state = {
            key: sharded.from_rank_offsets(key, torch.randn(parameters).to(dtype))
            for part in range(_PARTS)
            for kind, dtype in (*kinds, ("square", torch.float32))
            for key in [f"{part}.{kind}"]
        }
        queue: Any = megatron("core.dist_checkpointing.strategies.async_utils").AsyncCallsQueue
        self.queue = queue()

    def at_once(self) -> tuple[float, float]:
        """Save synchronously; return seconds of Megatron's part, and of the manifest's."""
        save = begin(self.folder, "iter_0000001", self.work)
        save.path.mkdir(exist_ok=True)
        own = seconds(lambda: self.megatron("core.dist_checkpointing").save(self.state, str(save.path)))
        save.tracker.write_text("1", encoding="ascii")
        return own, seconds(lambda: finish(save, self.work))

    def in_the_background(self) -> float:
        """Save asynchronously while every tensor changes; return the seconds in which training waits."""
        started = time.perf_counter()
        save = begin(self.folder, "iter_0000001", self.work)
        save.path.mkdir(exist_ok=True)
        request = self.megatron("core.dist_checkpointing").save(
            self.state, str(save.path), async_sharded_save=True
        )
        request.add_finalize_fn(lambda: save.tracker.write_text("1", encoding="ascii"))
        self.queue.schedule_async_request(listed_at_the_end(request, save, self.work))
        blocked = time.perf_counter() - started
        for tensor in self.state.values():
            tensor.data.add_(1)
        process = self.queue.async_calls[-1].async_caller.process
        while process is not None and process.is_alive():
            time.sleep(0.01)
        return blocked + seconds(lambda: self.queue.maybe_finalize_async_calls(blocking=True))

    def is_whole(self) -> bool:
        """Return whether what was saved last verifies, and is named by the tracker; then delete it."""
        path = self.folder / "iter_0000001"
        listed = manifest.read(path)
        whole = listed is not None and not manifest.damage(path, listed, contents=True)
        named = (self.folder / TRACKER).read_text(encoding="ascii") == "1"
        shutil.rmtree(path)
        return whole and named


def seconds(do: Callable[[], Any]) -> float:
    """Return how long something takes."""
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def _measured(saves: Saves, times: int) -> Metrics:
    saves.at_once(), saves.is_whole()  # plans, and files' pages
    rounds, whole = [], True
    for _ in range(times):
        own, listing = saves.at_once()
        whole &= saves.is_whole()
        blocked = saves.in_the_background()
        whole &= saves.is_whole()
        rounds.append((own, listing, blocked))
    own, listing, blocked = map(statistics.median, zip(*rounds, strict=True))
    size = sum(tensor.data.numel() * tensor.data.itemsize for tensor in saves.state.values())
    found: dict[str, Any] = {
        "state_bytes": size,
        "synchronous_s": own,
        "blocked_s": blocked,
        "blocking_ratio": blocked / own,
        "manifest_s": listing,
        "verify_overhead": listing / own,
    }
    if not whole:
        found["failed"] = "a checkpoint was not whole"
    return found
