"""Where Megatron's specifications choose the experts module.

Imports nothing of Megatron: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.grouped_experts.experts import grouped_experts
from mindspeed_dsa.features.moe.grouped_experts.feature import Options


def provide_grouped_experts(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``LocalSpecProvider.grouped_mlp_modules``: as for sequential experts, but for their class."""

    def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: bool, *args: Any, **kwargs: Any) -> Any:
        if not moe_use_grouped_gemm:
            return original(self, moe_use_grouped_gemm, *args, **kwargs)
        sequential = original(self, False, *args, **kwargs)
        if isinstance(sequential, functools.partial):
            return functools.partial(grouped_experts(context), *sequential.args, **sequential.keywords)
        _, submodules = sequential
        return grouped_experts(context), submodules

    return grouped_mlp_modules


def specify_grouped_experts(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``get_moe_module_spec`` of releases without providers."""

    def get_moe_module_spec(
        use_te: bool | None = True,
        num_experts: int | None = None,
        moe_grouped_gemm: bool | None = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if use_te or not moe_grouped_gemm:
            return original(use_te, num_experts, moe_grouped_gemm, *args, **kwargs)
        spec = original(use_te, num_experts, False, *args, **kwargs)
        spec.submodules.experts.module = grouped_experts(context)
        return spec

    return get_moe_module_spec


def validate_on_every_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``validate_args``: what it says of grouped experts is that some kernels need a certain GPU."""

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        if not getattr(args, "moe_grouped_gemm", False) or args.transformer_impl != "local":
            return original(args, *rest, **kwargs)
        args.moe_grouped_gemm = False
        try:
            return original(args, *rest, **kwargs)
        finally:
            args.moe_grouped_gemm = True

    return validate_args
