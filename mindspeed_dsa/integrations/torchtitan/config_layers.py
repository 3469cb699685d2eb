"""Norms, experts and dispatchers of TorchTitan 0.3 on the operators, each with its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor

from mindspeed_dsa.integrations.torchtitan.layers import (
    Routed,
    gather_back,
    multiply_up_to,
    normalise,
    route,
)
from torchtitan.distributed.spmd_types import current_spmd_mesh, maybe_set_sparse_mesh
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common import RMSNorm
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher


class FusedRMSNorm(RMSNorm):
    """RMSNorm by the operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """Configuration of the norm it replaces."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last axis."""
        return normalise(input, self.weight, self.eps)


class GroupedMatmulExperts(GroupedExperts):
    """TorchTitan's experts, whose matrices are multiplied by the operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Configuration of the experts it replaces."""

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return multiply_up_to(A, B_t, offs)


@dataclass(frozen=True, kw_only=True)
class RoutedMetadata:
    """Metadata that a dispatch leaves for the way back."""

    routed: Routed
    exchanged: Any
    """TorchTitan's own, where rows went to other ranks."""


class PermutingDispatcher(LocalTokenDispatcher):
    """TorchTitan's dispatcher of one rank's tokens, which are permuted by the operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        """Configuration of the dispatcher it replaces."""

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, counts: Tensor
    ) -> Any:
        routed = route(x_TD, topk_expert_ids_TK, topk_scores_TK, self.num_experts)
        return routed.rows, counts, routed

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        return gather_back(routed_output_RD, metadata)


class PermutingExchange(AllToAllTokenDispatcher):
    """TorchTitan's dispatcher of expert parallel ranks, each of which permutes its tokens by the operator.

    TorchTitan decides what is exchanged, and in which order of ranks and experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """Configuration of the dispatcher it replaces."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._routed: Routed | None = None

    def _local_reorder(self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor) -> Any:
        self._routed = routed = route(x_TD, topk_expert_ids_TK, topk_scores_TK, self.num_experts)
        # The second is for the way back, which is ours.
        return routed.rows, routed.row_map, routed.row_scores

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        rows, counts, exchanged = super().dispatch(*args, **kwargs)
        routed, self._routed = self._routed, None
        assert routed is not None
        return rows, counts, RoutedMetadata(routed=routed, exchanged=exchanged)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        if self.ep_mesh is not None:
            routed_output_RD = self._back_from_ranks(routed_output_RD, metadata.exchanged)
        return gather_back(routed_output_RD, metadata.routed)

    def _back_from_ranks(self, rows: Tensor, exchanged: Any) -> Tensor:
        """Return what the experts of all ranks made of this rank's rows, in the order they were sent."""
        assert self.ep_mesh is not None
        with maybe_set_sparse_mesh():
            mesh = current_spmd_mesh() if get_spmd_backend() == "spmd_types" else self.ep_mesh
            group = mesh.get_group("ep")
            rows = self._unpermute(rows, exchanged.input_shape, exchanged.permuted_indices)
            rows = self._combine_token_exchange(rows, group, exchanged.input_splits, exchanged.output_splits)
        # Kernels read memory, and do not know of transfers that are on their way.
        return wait_tensor(rows)  # type: ignore[no-any-return]
