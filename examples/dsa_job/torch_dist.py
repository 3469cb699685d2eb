"""Megatron's ``torch_dist`` checkpoints, written by torch's writer in this process or in a forked one.

Megatron's own writer starts processes that outlive a killed parent and keep its output pipes open. The files
are the same.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch.futures import Future

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.runs.files import RunError, end_with_parent, sync


def save_in_this_process(megatron: Megatron | None = None) -> Any:
    """Return a strategy for ``dist_checkpointing.save`` that starts no other process by itself."""
    megatron = megatron or Megatron()
    torch_dist: Any = megatron("core.dist_checkpointing.strategies.torch")
    request: Any = megatron("core.dist_checkpointing.strategies.async_utils").AsyncRequest

    # Since 0.17 Megatron silently ignores a strategy of any other class.
    class SaveWithTorch(torch_dist.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
            shards = self.planned(sharded_state_dict, checkpoint_dir)
            shards.write()
            shards.complete()

        def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path, *_: Any) -> Any:
            shards = self.planned(sharded_state_dict, checkpoint_dir)

            return request(write_beside(os.getpid(), shards.write), (), [shards.complete])

        def planned(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Shards:
            by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            shards = Shards(checkpoint_dir)
            torch_checkpoint.state_dict_saver.save(
                torch_dist.mcore_to_pyt_state_dict(by_key, False),
                storage_writer=shards,
                planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )
            return shards

    return SaveWithTorch("torch_dist", 1)


def write_beside(parent: int, write: Callable[[], None]) -> Callable[[], None]:
    """Return the main function of a process that is forked to write.

    The process ends with its parent, with which it shares its output. It computes in one thread, because
    other threads are not forked with it.

    Args:
        parent: process id of the process that forks; in that process itself the function just writes.
        write: function that writes the files.
    """

    def beside() -> None:
        if os.getpid() != parent:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
            torch.set_num_threads(1)
            if not end_with_parent(parent):
                return
        write()

    return beside


class Shards(torch_checkpoint.FileSystemWriter):
    """torch's writer in three parts: copy a rank's tensors, write them, list all ranks' tensors."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, per_thread_copy_ahead=0)  # which would use the device
        self._kept: dict[Any, Any] = {}
        self._plan: Any = None
        self._metadata: Any = None
        # An unnamed file, so that nothing is left of it; shared with a process forked later.
        self._outcome: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        """Copy the tensors to the host; return an empty list, where torch expects written items."""
        self._plan = plan
        self._kept = {item.index: _on_the_host(planner.resolve_data(item)) for item in plan.items}
        # The copies are asynchronous, and the host may read them only now.
        torch.cuda.synchronize()
        nothing: Future[list[Any]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Any, results: Any) -> None:
        """Keep the metadata on the first rank, until there are results."""
        self._metadata = metadata

    def resolve_data(self, item: Any) -> Any:
        """Return the copied data of an item, as a planner does."""
        return self._kept[item.index]

    def write(self) -> None:
        """Write this rank's file, in any process; :meth:`complete` reads the outcome."""
        outcome: tuple[str, list[Any]]
        try:
            results = super().write_data(self._plan, self).wait()  # type: ignore[arg-type]
            # torch syncs before it closes a file, when the end may still be in a buffer of Python.
            for name in {result.storage_data.relative_path for result in results}:
                sync(Path(self.path, name))
            outcome = "", results
        except Exception as error:  # tensors and files of any kind
            outcome = f"{type(error).__name__}: {error}", []
        with contextlib.suppress(OSError):  # complete() then finds nothing
            pickle.dump(outcome, self._outcome)
            self._outcome.flush()
        self._kept.clear()

    def complete(self) -> None:
        """Write the list of all ranks' tensors after all have written them; all ranks call this together.

        Raises:
            RunError: a rank has not written its file; raised on all ranks.
        """
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, self._outcome_of_this_rank())
        problems = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(ranks) if problem]
        if problems:
            raise RunError(
                f"checkpoint {self.path} was not written ({'; '.join(problems)}); earlier ones are as they "
                "were: make room, or name another folder with --save"
            )
        if dist.get_rank() == 0:
            super().finish(self._metadata, [results for _, results in ranks])

    def _outcome_of_this_rank(self) -> Any:
        with self._outcome as file:
            # A forked writer shares the file's offset, which is at the end after it has written.
            file.seek(0)
            try:
                return pickle.load(file)
            except EOFError:
                # The writer was killed before it stored an outcome.
                return "its writer has ended without a word", []


def _on_the_host(data: Any) -> Any:
    """Return a tensor on the host, on pages private to a forked process; other data unchanged."""
    if not isinstance(data, torch.Tensor):
        return data
    tensor = data.detach()
    if not tensor.is_cpu:
        return tensor.to("cpu", non_blocking=True)
    # Pinned pages are shared with forked processes.
    return tensor.clone() if tensor.is_shared() or tensor.is_pinned() else tensor
