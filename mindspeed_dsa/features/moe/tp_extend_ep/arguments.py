"""The layout of the experts, rewritten before Megatron derives anything from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.features.moe.tp_extend_ep.validation import check_tp_extend_ep, layout


def extend(args: Any) -> Sequence[str]:
    """Multiply the expert parallel size by the tensor parallel size; ``Feature.rewrite``.

    An expert tensor parallel size of 1 says that this has been done: by an earlier call, by the checkpoint
    that the arguments come from, or by the user.
    """
    tp, ep, etp = layout(args)
    if etp is not None or list(check_tp_extend_ep(args)):
        return ()
    args.expert_model_parallel_size, args.expert_tensor_parallel_size = tp * ep, 1
    text = (
        f"experts: tensor parallel {tp} x expert parallel {ep} becomes expert parallel {tp * ep} with whole "
        f"experts (--expert-tensor-parallel-size 1); attention stays tensor parallel {tp}"
    )
    return (text,)
