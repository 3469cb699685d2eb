"""What runs inside the pool's workers: a step whose linear layers add to ``main_grad`` themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch

from mindspeed_dsa.features.platform.without_apex.functions import Kernels
from tests.features.memory.recompute_cases import built
from tests.support import model as job


def step(
    switches: Mapping[str, Any],
    overrides: Mapping[str, Any],
    fusion: bool,
    dtype: str = "float32",
    overlap: bool = False,
    **layout: Any,
) -> dict[str, Any]:
    """Gradients of two microbatches, and how many of them the linear layers have added.

    Args:
        switches: what is switched on.
        overrides: of the configuration.
        fusion: Megatron's ``gradient_accumulation_fusion``.
        dtype: of weights.
        overlap: gradients are reduced while backward runs.
        **layout: sizes of groups.
    """
    job.start(switches, **layout)
    kind = getattr(torch, dtype)
    precision = {"params_dtype": kind, "bf16": kind == torch.bfloat16}
    cfg, chunks = built({**overrides, **precision, "gradient_accumulation_fusion": fusion}, **layout)
    chunks = [chunk.to(kind) for chunk in chunks]
    original, added = Kernels.wgrad_gemm_accum_fp32, []

    def watched(rows: Any, grad_output: Any, main_grad: Any) -> None:
        assert (rows.dtype, main_grad.dtype) == (kind, torch.float32)
        added.append(tuple(main_grad.shape))
        original(rows, grad_output, main_grad)

    with mock.patch.object(Kernels, "wgrad_gemm_accum_fp32", staticmethod(watched)):
        job.train_step(cfg, chunks, list(job.samples(4).split(2)), ddp={"overlap_grad_reduce": overlap})
    return {"gradients": job.gradients(chunks), "added": added}
