"""Norms, rotary embeddings, experts and token dispatchers for TorchTitan 0.3 that use our operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor

from mindspeed_dsa.integrations.torchtitan.latent_attention import local
from mindspeed_dsa.integrations.torchtitan.layers import (
    Routed,
    gather_back,
    multiply_up_to,
    normalise,
    rotate_heads,
    route,
)
from torchtitan.distributed.spmd_types import current_spmd_mesh, maybe_set_sparse_mesh
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common import RMSNorm
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher


class FusedRMSNorm(RMSNorm):
    """RMSNorm computed by our operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """Configuration, with the fields of TorchTitan's own class."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return normalise(input, self.weight, self.eps)


class PairsRotary(ComplexRoPE):
    """Rotary embedding of neighbouring dimensions, computed by our operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """Configuration, with the fields of TorchTitan's own class."""

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate ``[..., heads, dim]`` by complex numbers ``[..., 1, dim / 2]``."""
        turns = local(rope_cache)
        cos, sin = (part.repeat_interleave(2, dim=-1) for part in (turns.real, turns.imag))
        return rotate_heads(query, cos, sin, "pairs"), rotate_heads(key, cos, sin, "pairs")


class HalvesRotary(CosSinRoPE):
    """Rotary embedding of opposite dimensions, computed by our operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """Configuration, with the fields of TorchTitan's own class."""

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate ``[..., heads, dim]`` by cosines and sines ``[..., 1, 2 * dim]``."""
        cos, sin = local(rope_cache).chunk(2, dim=-1)
        return rotate_heads(query, cos, sin, "halves"), rotate_heads(key, cos, sin, "halves")


class GroupedMatmulExperts(GroupedExperts):
    """TorchTitan's experts, computed with our grouped matmul."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Configuration, with the fields of TorchTitan's own class."""

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return multiply_up_to(A, B_t, offs)


@dataclass(frozen=True, kw_only=True)
class RoutedMetadata:
    """Data of a token dispatch that the matching combine needs."""

    routed: Routed
    exchanged: Any
    """TorchTitan's metadata of the exchange between ranks."""


class PermutingDispatcher(LocalTokenDispatcher):
    """TorchTitan's dispatcher without expert parallelism, with permutation by our operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        """Configuration, with the fields of TorchTitan's own class."""

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, counts: Tensor
    ) -> Any:
        routed = route(x_TD, topk_expert_ids_TK, topk_scores_TK, self.num_experts)
        return routed.rows, counts, routed

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        return gather_back(routed_output_RD, metadata)


class PermutingExchange(AllToAllTokenDispatcher):
    """TorchTitan's expert parallel dispatcher, with permutation by our operator on each rank.

    TorchTitan still decides which tokens are exchanged, and in which order of ranks and experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """Configuration, with the fields of TorchTitan's own class."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._routed: Routed | None = None

    def _local_reorder(self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor) -> Any:
        self._routed = routed = route(x_TD, topk_expert_ids_TK, topk_scores_TK, self.num_experts)
        # TorchTitan stores the second value for its own combine, which we replace.
        return routed.rows, routed.row_map, routed.row_scores

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        rows, counts, exchanged = super().dispatch(*args, **kwargs)
        # dispatch() of the base class has just called _local_reorder(), which stored it.
        routed, self._routed = self._routed, None
        assert routed is not None
        return rows, counts, RoutedMetadata(routed=routed, exchanged=exchanged)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        if self.ep_mesh is not None:
            routed_output_RD = self._back_from_ranks(routed_output_RD, metadata.exchanged)
        return gather_back(routed_output_RD, metadata.routed)

    def _back_from_ranks(self, rows: Tensor, exchanged: Any) -> Tensor:
        """Send expert outputs back by all-to-all, to the ranks that sent the tokens and in their order."""
        assert self.ep_mesh is not None
        with maybe_set_sparse_mesh():
            mesh = current_spmd_mesh() if get_spmd_backend() == "spmd_types" else self.ep_mesh
            group = mesh.get_group("ep")
            rows = self._unpermute(rows, exchanged.input_shape, exchanged.permuted_indices)
            rows = self._combine_token_exchange(rows, group, exchanged.input_splits, exchanged.output_splits)
        # Our kernels read memory directly, so wait for the functional collective here.
        return wait_tensor(rows)  # type: ignore[no-any-return]
