"""Megatron-LM's checks and loading of checkpoints, where FSDP2 is on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def validate_beside_experts_and_pipelines(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``validate_args``; with pipelines or experts it is not told of FSDP2.

    What it refuses beside them, the feature's own checks refuse; what it derives from the flag is made up
    for.
    """

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        alone = args.pipeline_model_parallel_size == 1 and args.expert_model_parallel_size == 1
        if alone or not getattr(args, "use_torch_fsdp2", False):
            return original(args, *rest, **kwargs)
        args.use_torch_fsdp2 = False
        try:
            # Tensor parallelism alone would ask for it.
            with mock.patch.dict(os.environ, _CONNECTIONS):
                result = original(args, *rest, **kwargs)
        finally:
            args.use_torch_fsdp2 = True
        streams = getattr(args, "high_priority_stream_groups", None)
        if streams is not None:
            streams += [group for group in ("dp_cp", "ep_dp") if group not in streams]
        return result

    return validate_args


def load_everything(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``load_checkpoint``."""

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("skip_load_to_model_and_opt", None)
        return original(*args, **kwargs)

    return load_checkpoint
