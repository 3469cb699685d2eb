"""What the process imports that the workers of a pool are forked from.

What others wrote is put out of the garbage collector's sight before Megatron is imported: there are half
a million objects of it, and every case ends with a collection. The search for stale references still
sees all that Megatron and this library hold.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import warnings

import mindspeed_dsa
from tests.support import sources, worker

__all__ = ["worker"]

# What Megatron imports, and what features of torch that the cases use import when they are first called.
_OTHERS = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.experimental",
    "torch.export.pt2_archive",
    "torch.nn.attention.flex_attention",
    "torch.utils.cpp_extension",
    "torch.utils.tensorboard",
    "hypothesis",
    "pytest",
    "triton",
    "wrapt",
    "yaml",
)
_MEGATRON = (
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.experimental_attention_variant.dsa",
)


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)


_import(_OTHERS)
sources.parse_once()
sources.check_all()
gc.collect()
gc.freeze()
with contextlib.redirect_stderr(io.StringIO()), mindspeed_dsa.enabled(mindspeed_platform="cpu"):
    # As in a job, so that what Megatron would compile stays eager.
    _import(_MEGATRON)
