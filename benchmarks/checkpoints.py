"""Seconds that saves of Megatron's distributed checkpoints take from training, with and without a manifest.

The state is that of mixed precision with Adam: weights in bf16, master weights and both moments in float32.
Asynchronous saves are written by a process that is forked. What the manifest adds is the difference of whole
saves with and without it, in turns, because checksums are made while files are written; it is told of the
processors' time, which other work on the machine does not change, and of the time that passes.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

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
from mindspeed_dsa.features.checkpoints.whole.written import sum_a_file, sum_an_item
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
            found = _measured(Saves(Path(name), parameters, megatron), 1 if quick else 7)
        finally:
            megatron("core.parallel_state").destroy_model_parallel()
            dist.destroy_process_group()
    return {**found, "example job": run_all(quick)}


class Saves:
    """Saves of one state, timed.

    Attributes:
        work: what whole-checkpoints knows.
    """

    def __init__(self, folder: Path, parameters: int, megatron: Megatron) -> None:
        self.folder, self.megatron = folder, megatron
        options = Options(verify=True, save=folder)
        self.context = Context("whole-checkpoints", options, megatron, log.get("whole-checkpoints"))
        self.work = self.context.state(Work)
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

    def plainly(self) -> Spent:
        """Save synchronously as Megatron alone does."""
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
        """Save synchronously, with a manifest."""

        def write() -> None:
            with self.saving() as save:
                self.megatron("core.dist_checkpointing").save(self.state, str(save.path))
            save.tracker.write_text("1", encoding="ascii")
            finish(save, self.work)

        return spent(write)

    @contextlib.contextmanager
    def saving(self) -> Iterator[Save]:
        """Begin a save whose files are summed as they are written."""
        save = begin(self.folder, "iter_0000001", self.work)
        save.path.mkdir(exist_ok=True)
        module: Any = self.megatron("core.dist_checkpointing.strategies.filesystem_async")
        write = sum_a_file(module.FileSystemWriterAsync.write_preloaded_data, self.context)
        item = sum_an_item(module._write_item, self.context)
        self.work.saving = save
        with (
            mock.patch.object(module.FileSystemWriterAsync, "write_preloaded_data", staticmethod(write)),
            mock.patch.object(module, "_write_item", functools.wraps(module._write_item)(item)),
        ):
            yield save
        self.work.saving = None

    def in_the_background(self) -> float:
        """Save asynchronously while every tensor changes; return the seconds in which training waits."""
        started = time.perf_counter()
        with self.saving() as save:
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
        return blocked + spent(lambda: self.queue.maybe_finalize_async_calls(blocking=True)).wall

    def is_whole(self) -> bool:
        """Return whether what was saved last verifies, and is named by the tracker; then delete it."""
        path = self.folder / "iter_0000001"
        listed = manifest.read(path)
        whole = listed is not None and not manifest.damage(path, listed, contents=True)
        named = (self.folder / TRACKER).read_text(encoding="ascii") == "1"
        shutil.rmtree(path)
        return whole and named


def _measured(saves: Saves, times: int) -> dict[str, Any]:
    saves.at_once(), saves.is_whole(), saves.plainly()  # plans, and files' pages
    rounds, whole = [], True
    for _ in range(times):
        plain = saves.plainly()
        listed = saves.at_once()
        whole &= saves.is_whole()
        blocked = saves.in_the_background()
        whole &= saves.is_whole()
        rounds.append((plain, listed, blocked))
    wall = statistics.median(plain.wall for plain, _, _ in rounds)
    blocked = statistics.median(blocked for _, _, blocked in rounds)
    size = sum(tensor.data.numel() * tensor.data.itemsize for tensor in saves.state.values())
    found: dict[str, Any] = {
        "state_bytes": size,
        "synchronous_s": wall,
        "synchronous_cpu_s": statistics.median(plain.cpu for plain, _, _ in rounds),
        "blocked_s": blocked,
        "blocking_ratio": blocked / wall,
        "with_manifest_s": statistics.median(listed.wall for _, listed, _ in rounds),
        "verify_overhead": statistics.median(listed.cpu / plain.cpu - 1 for plain, listed, _ in rounds),
        "verify_overhead_wall": statistics.median(
            listed.wall / plain.wall - 1 for plain, listed, _ in rounds
        ),
    }
    if not whole:
        found["failed"] = "a checkpoint was not whole"
    return found
