"""Worker functions: latent attention that switches between sharded rows and sharded heads, and
checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.features.attention.context_parallel import dense_model
from tests.support import model as job

ON = {"mla_sp_tp_sp": True}


def facts(**arguments: Any) -> dict[str, Any]:
    """Return a step in pieces of rows, and facts about the layers."""
    from mindspeed_dsa.features.attention.sp_tp_sp import pieces
    from mindspeed_dsa.features.attention.sp_tp_sp.layers import OutputProjection

    layers: list[Any] = []
    build = dense_model.gpt_model

    def watched(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        layers.extend(model.decoder.layers)
        return model

    dense_model.gpt_model = watched
    received: list[tuple[int, ...]] = []
    forward = OutputProjection.forward

    def told(self: Any, heads: Any) -> Any:
        received.append(tuple(heads.shape))
        return forward(self, heads)

    OutputProjection.forward = told
    try:
        with mock.patch.object(pieces, "LEAST_TOKENS", 1):
            result = dense_model.step("latent", more=ON, **arguments)
    finally:
        dense_model.gpt_model, OutputProjection.forward = build, forward
    attention = layers[0].self_attention
    named = {name: tuple(p.shape) for name, p in attention.named_parameters() if "up_proj" not in name}
    return {**result, "shapes": named, "received": received}


def checkpoint(folder: str, on_saving: bool, on_loading: bool) -> dict[str, Any]:
    """Return whether a model and another one loaded from its checkpoint have equal outputs."""
    outputs = [_model_output(folder, on, load) for on, load in ((on_saving, False), (on_loading, True))]
    return {"equal": torch.allclose(*outputs, rtol=1e-5, atol=1e-6), "size": float(outputs[0].abs().max())}


def _model_output(folder: str, on: bool, load: bool) -> Any:
    from dsa_job.torch_dist import save_in_this_process
    from megatron.core import dist_checkpointing, parallel_state

    import mindspeed_dsa

    mindspeed_dsa.disable()
    parallel_state.destroy_model_parallel()
    with dense_model.dense("latent", 1):
        job.start({**dense_model.switches("latent", 1, None, None), **(ON if on else {})}, tp=2)
        cfg = job.config(tensor_model_parallel_size=2, sequence_parallel=True)
        model = job.gpt_model(cfg)
        if load:
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, torch.nan)
            state = dist_checkpointing.load(model.sharded_state_dict(), folder)
            model.load_state_dict(state)
        else:
            if dist.get_rank() == 0:
                Path(folder).mkdir()
            dist.barrier()
            dist_checkpointing.save(model.sharded_state_dict(), folder, save_in_this_process())
        return job.per_token_loss(model, job.samples(2)).detach()
