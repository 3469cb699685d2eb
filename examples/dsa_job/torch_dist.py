"""Writing Megatron's ``torch_dist`` checkpoints without helper processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Megatron


def save_in_this_process(megatron: Megatron | None = None) -> Any:
    """A strategy for ``dist_checkpointing.save`` that uses torch's own writer.

    Megatron's writer starts processes that outlive a killed parent and keep its output pipes open. The
    files are the same.
    """
    import torch.distributed.checkpoint as torch_checkpoint

    torch_dist: Any = (megatron or Megatron())("core.dist_checkpointing.strategies.torch")

    # Since 0.17 any other class is put aside without a word.
    class SaveInThisProcess(torch_dist.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
            by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            torch_checkpoint.state_dict_saver.save(
                torch_dist.mcore_to_pyt_state_dict(by_key, False),
                storage_writer=torch_checkpoint.filesystem.FileSystemWriter(checkpoint_dir),
                planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )

    return SaveInThisProcess("torch_dist", 1)
