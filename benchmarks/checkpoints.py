"""Seconds that training waits for saves of Megatron's distributed checkpoints, with and without a manifest.

The state is from mixed precision training with Adam: weights in bf16, master weights and both moments in
fp32. A forked process writes asynchronous saves. The cost of manifest and checksums is the difference between
synchronous saves with and without them, run alternately. It is given in CPU time, which other load on the
machine does not change, and in wall-clock time.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.job_checkpoints import run_all
from benchmarks.registry import Metrics
from benchmarks.spent import Spent, spent
from mindspeed_dsa import log
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.checkpoints.whole.feature import Options
from mindspeed_dsa.features.checkpoints.whole.saving import begin, finish, listed_at_the_end
from mindspeed_dsa.features.checkpoints.whole.work import Save, Work
from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.whole_checkpoints import TRACKER

_PARTS = 8
_BYTES = 2 + 3 * 4
"""Bytes of one parameter's state: one bf16 and three fp32 numbers."""


def run(device: str, quick: bool = False, size: str = "1") -> Metrics:
    """Return all metrics of the case.

    Args:
        device: not used: the state is on the host.
        quick: a state too small for meaningful figures.
        size: state's size in GB.
    """
    import mindspeed_dsa

    # 1 GB / 14 bytes / 8 parts = 8.9 million parameters in a part.
    parameters = int((0.002 if quick else float(size)) * 1e9) // _BYTES // _PARTS
    with (
        mindspeed_dsa.enabled(mindspeed_platform="cpu"),
        tempfile.TemporaryDirectory(prefix="checkpoints-") as name,
    ):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        megatron = Megatron()
        megatron("core.parallel_state").initialize_model_parallel()
        try:
            metrics = _measured(Saves(Path(name), parameters, megatron), 1 if quick else 7)
        finally:
            megatron("core.parallel_state").destroy_model_parallel()
            dist.destroy_process_group()
    return {**metrics, "example job": run_all(quick)}


class Saves:
    """Timed saves of one state.

    Attributes:
        works: dict from "with checksums" to the state of whole-checkpoints, each with its own folder.
        expected: copies of all tensors when the latest save with a manifest began.
    """

    def __init__(self, folder: Path, parameters: int, megatron: Megatron) -> None:
        self.folder, self.megatron = folder, megatron
        self.works = {}
        for verify in (False, True):
            options = Options(verify=verify, save=folder / str(verify))
            context = Context("whole-checkpoints", options, megatron, log.get("whole-checkpoints"))
            self.works[verify] = context.state(Work)
        sharded: Any = megatron("core.dist_checkpointing.mapping").ShardedTensor
        kinds = ("weight", torch.bfloat16), ("master", torch.float32), ("mean", torch.float32)
        self.state = {
            key: sharded.from_rank_offsets(key, torch.randn(parameters).to(dtype))
            for part in range(_PARTS)
            for kind, dtype in (*kinds, ("square", torch.float32))
            for key in [f"{part}.{kind}"]
        }
        self.expected: dict[str, torch.Tensor] = {}
        queue: Any = megatron("core.dist_checkpointing.strategies.async_utils").AsyncCallsQueue
        self.queue = queue()

    def plainly(self) -> Spent:
        """Save synchronously with Megatron only."""
        path = self.folder / "plain"
        path.mkdir()

        def save() -> None:
            self.megatron("core.dist_checkpointing").save(self.state, str(path))
            (self.folder / "plain.txt").write_text("1", encoding="ascii")

        try:
            return spent(save)
        finally:
            shutil.rmtree(path)

    def at_once(self) -> Spent:
        """Save synchronously, with a manifest and checksums."""
        self._copy_tensors()

        def write() -> None:
            with self.saving(verify=True) as save:
                self.megatron("core.dist_checkpointing").save(self.state, str(save.path))
            save.tracker.write_text("1", encoding="ascii")
            finish(save, self.works[True])

        return spent(write)

    @contextlib.contextmanager
    def saving(self, verify: bool) -> Iterator[Save]:
        """Track a save inside the block."""
        work = self.works[verify]
        work.saving = save = begin(self.folder / str(verify), "iter_0000001", work)
        save.path.mkdir(exist_ok=True)
        yield save
        work.saving = None

    def in_the_background(self, verify: bool) -> float:
        """Save asynchronously while every tensor changes; return the seconds that training waits."""
        self._copy_tensors()
        started = time.perf_counter()
        with self.saving(verify) as save:
            request = self.megatron("core.dist_checkpointing").save(
                self.state, str(save.path), async_sharded_save=True
            )
            request.add_finalize_fn(lambda: save.tracker.write_text("1", encoding="ascii"))
            self.queue.schedule_async_request(listed_at_the_end(request, save, self.works[verify]))
        blocked = time.perf_counter() - started
        # Change the state as a training step would, while the writer still writes.
        for tensor in self.state.values():
            tensor.data.add_(1)
        process = self.queue.async_calls[-1].async_caller.process
        while process is not None and process.is_alive():
            time.sleep(0.01)
        # Training waits at the begin of a save and at its end.
        return blocked + spent(lambda: self.queue.maybe_finalize_async_calls(blocking=True)).wall

    def is_whole(self) -> bool:
        """Return whether the latest save verifies, has the expected tensors and is named by the tracker.

        Deletes the save.
        """
        folder = max(self.folder.glob("*/iter_0000001"), key=lambda path: path.stat().st_mtime).parent
        path = folder / "iter_0000001"
        listed = manifest.read(path)
        whole = listed is not None and not manifest.damage(path, listed, contents=True)
        named = (folder / TRACKER).read_text(encoding="ascii") == "1"
        empty = {key: replace(entry, data=torch.empty_like(entry.data)) for key, entry in self.state.items()}
        loaded = self.megatron("core.dist_checkpointing").load(empty, str(path))
        equal = all(torch.equal(loaded[key], tensor) for key, tensor in self.expected.items())
        shutil.rmtree(path)
        return whole and named and equal

    def _copy_tensors(self) -> None:
        self.expected = {key: entry.data.clone() for key, entry in self.state.items()}


def _measured(saves: Saves, times: int) -> dict[str, Any]:
    saves.at_once(), saves.is_whole(), saves.plainly()  # warmup: plans, and files' pages
    rounds, whole = [], True
    for _ in range(times):
        plain = saves.plainly()
        listed = saves.at_once()
        whole &= saves.is_whole()
        blocked = saves.in_the_background(verify=False)
        whole &= saves.is_whole()
        summed = saves.in_the_background(verify=True)
        whole &= saves.is_whole()
        rounds.append((plain, listed, blocked, summed))
    wall = statistics.median(plain.wall for plain, *_ in rounds)
    blocked, summed = (statistics.median(each[at] for each in rounds) for at in (2, 3))
    size = sum(tensor.data.numel() * tensor.data.itemsize for tensor in saves.state.values())
    metrics: dict[str, Any] = {
        "state_bytes": size,
        "synchronous_s": wall,
        "synchronous_cpu_s": statistics.median(plain.cpu for plain, *_ in rounds),
        "blocked_s": blocked,
        "blocking_ratio": blocked / wall,
        "blocking_ratio_with_sums": summed / wall,
        "with_manifest_s": statistics.median(listed.wall for _, listed, *_ in rounds),
        "verify_overhead": statistics.median(listed.cpu / plain.cpu - 1 for plain, listed, *_ in rounds),
        "verify_overhead_wall": statistics.median(
            listed.wall / plain.wall - 1 for plain, listed, *_ in rounds
        ),
    }
    if not whole:
        metrics["failed"] = "a checkpoint was not whole, or had other tensors than were saved"
    return metrics
