"""What the process imports that the workers of a pool are forked from."""

from __future__ import annotations

import contextlib
import gc
import io

import mindspeed_dsa
from tests.support import sources, third_party, worker

__all__ = ["worker"]

_MEGATRON = (
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.experimental_attention_variant.dsa",
)

gc.disable()  # imports leave no garbage
third_party.load(third_party.OF_CASES)
sources.parse_once()
sources.check_all()
third_party.out_of_sight()
with contextlib.redirect_stderr(io.StringIO()), mindspeed_dsa.enabled(mindspeed_platform="cpu"):
    # As in a job, so that what Megatron would compile stays eager.
    third_party.load(_MEGATRON)
gc.enable()
