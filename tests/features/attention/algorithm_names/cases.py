"""What runs inside the pool's workers."""

from __future__ import annotations

from typing import Any

import torch

from tests.support import model as job


class _Recorder(torch.nn.Module):
    """An attention that notes what its layer says."""

    told: list[str] = []  # noqa: RUF012

    def __init__(self, cp_comm_type: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.told.append(cp_comm_type)


def names_of_layers(names: list[str], **switches: Any) -> list[str]:
    """What Megatron's layers tell their attentions, one by one."""
    job.start(switches)
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    cfg = job.config(num_layers=len(names), **job.WITHOUT_EXPERTS)
    cfg.context_parallel_size, cfg.cp_comm_type = 2, names
    submodules = TransformerLayerSubmodules(self_attention=ModuleSpec(module=_Recorder))
    _Recorder.told.clear()
    for number in range(1, len(names) + 1):
        TransformerLayer(cfg, submodules, layer_number=number)
    assert cfg.cp_comm_type == names
    assert type(cfg.cp_comm_type) is list
    return list(_Recorder.told)
