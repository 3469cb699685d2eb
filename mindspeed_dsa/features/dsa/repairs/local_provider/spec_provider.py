"""The provider from which Megatron's spec functions take the modules of a local DSA model."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.megatron.local_modules import (
    duplicated_linear,
    layer_norm_column_parallel_linear,
)


@cache
def local_spec_provider(megatron: Megatron, groups_experts: bool) -> type:
    """A subclass of that Megatron's ``LocalSpecProvider``.

    Args:
        megatron: whose.
        groups_experts: whether it has experts for ``--moe-grouped-gemm`` without another package.
    """
    base: Any = megatron("core.models.backends").LocalSpecProvider
    torch_norm: Any = megatron("core.transformer.torch_norm").WrappedTorchNorm

    class LocalDSASpecProvider(base):
        """Megatron's local modules, completed by the modules that the DSA specs need."""

        def linear(self) -> type:
            """Linear layer replicated on every tensor parallel rank: down projections and indexer."""
            return duplicated_linear(megatron)

        def fuse_layernorm_and_linear(self) -> bool:
            """True, so that parameters are named as in a Transformer Engine build of the model."""
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            """Norm and column parallel linear in one module."""
            return layer_norm_column_parallel_linear(megatron)

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **kwargs: Any) -> Any:
            """Megatron's choice, without its side effect on the module's default norm."""
            return torch_norm if rms_norm else super().layer_norm(rms_norm=False, for_qk=for_qk, **kwargs)

        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *args: Any) -> Any:
            """Sequential experts if the grouped GEMM kernels are not installed: same values."""
            if moe_use_grouped_gemm and not groups_experts and find_spec("grouped_gemm") is None:
                warnings.warn(
                    "dsa-local-provider: --moe-grouped-gemm needs the grouped_gemm package, which is not "
                    "installed; the experts run sequentially instead",
                    stacklevel=2,
                )
                moe_use_grouped_gemm = False
            return super().grouped_mlp_modules(moe_use_grouped_gemm, *args)

    return LocalDSASpecProvider
