"""Projections from hidden states to query and key of multi-latent attention, for Megatron-core since 0.12.1.

Shapes are Megatron's, sequence first. A replicated down-projection returns the same tokens as its input. One
that is split over tensor parallel ranks gathers its input, and returns the whole sequence. Throughout, ``b``
is batch, ``s`` sequence, and *latent* the compressed key-value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, contiguous_format
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, all_reduce

from mindspeed_dsa.context_parallel.packs import PackRows
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.megatron.adapters import LowRank, adapters_of, base_of
from mindspeed_dsa.megatron.attribute_override import AttributeOverride
from mindspeed_dsa.megatron.gathered_weights import wait_for_weights
from mindspeed_dsa.megatron.local_modules import norm_of_fused_layer

Rotate = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Projections:
    """Computation of query and key of one MLA layer with the layer's own projections.

    Attributes:
        layer: Megatron's ``MLASelfAttention``.
        megatron: layer's Megatron.
        documents: packed documents of the layer's tokens; ``None`` for whole sequences.
        angles: rotary angles ``[positions, 1, 1, rope]`` that the model passes to its layers, as models of
            mcore-bridge do; ``None``: the layer computes them.
    """

    layer: Any
    megatron: Megatron
    documents: PackRows | None = None
    angles: Tensor | None = None

    def on(self, packed_seq_params: Any, hidden_states: Tensor) -> Projections:
        """Return a copy for one forward call, with the documents of ``packed_seq_params`` if it is given.

        Args:
            packed_seq_params: Megatron's description of packed documents, or ``None``.
            hidden_states: ``[s, 1, hidden]``; under sequence parallelism a part of the context parallel
                rank's tokens.
        """
        if packed_seq_params is None:
            return self
        rows = self.rows(hidden_states)
        return replace(self, documents=PackRows.of(packed_seq_params, rows, self.context_parallel_group()))

    def rows(self, hidden_states: Tensor) -> int:
        """Return the number of tokens on the context parallel rank; see :meth:`on` for ``hidden_states``."""
        # Under sequence parallelism a tensor parallel rank has 1/TP of the context parallel rank's tokens.
        is_split = self.layer.config.sequence_parallel
        return hidden_states.size(0) * (self.tensor_parallel_group().size() if is_split else 1)

    def tensor_parallel_group(self) -> ProcessGroup:
        """Return the layer's tensor parallel group; in Megatron-core 0.12 the global one."""
        group = self._group_of_its_own("tp")
        return (
            self.megatron("core.parallel_state").get_tensor_model_parallel_group() if group is None else group
        )

    def context_parallel_group(self) -> ProcessGroup:
        """Return the layer's context parallel group; in Megatron-core 0.12 the global one."""
        group = self._group_of_its_own("cp")
        return self.megatron("core.parallel_state").get_context_parallel_group() if group is None else group

    def down(self, projection: Any, hidden_states: Tensor, sizes: list[int]) -> list[Tensor]:
        """Apply a down-projection, all-gather its features if TP splits them, and split them by ``sizes``."""
        projected, _ = projection(hidden_states)
        # Fewer features than expected: this rank has only its shard of them.
        if projected.size(-1) != sum(sizes):
            gather = self.megatron("core.tensor_parallel").gather_from_tensor_model_parallel_region
            projected = gather(projected, **self._group_argument())
        return list(projected.split(sizes, dim=-1))

    def latent_query(self, hidden_states: Tensor) -> Tensor:
        """Return the normed latent query ``[s, b, q_lora_rank]``; without one, the hidden states."""
        layer, rank = self.layer, self.layer.config.q_lora_rank
        if rank is None:
            return hidden_states
        (latent_query,) = self.down(layer.linear_q_down_proj, hidden_states, [rank])
        return layer.q_layernorm(self.own_part(latent_query, hidden_states))  # type: ignore[no-any-return]

    def latent_key(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed latent and the unrotated rotary key.

        The latent ``[s, b, kv_lora_rank]`` covers the hidden states' tokens. The rotary key ``[s, b, rope]``
        is returned as projected, for the whole sequence if the projection is split over ranks.
        """
        layer, config = self.layer, self.layer.config
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        latent, rotary_key = self.down(layer.linear_kv_down_proj, hidden_states, sizes)
        return layer.kv_layernorm(self.own_part(latent, hidden_states)), rotary_key

    def own_part(self, states: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the part of ``states`` that covers the same tokens as ``hidden_states``.

        ``states`` cover the whole sequence, or are already this part.
        """
        if states.size(0) == hidden_states.size(0):
            return states
        scatter = self.megatron("core.tensor_parallel").scatter_to_sequence_parallel_region
        return scatter(states, **self._group_argument())  # type: ignore[no-any-return]

    def rotary_key_for_all_heads(
        self, rotary_key: Tensor, hidden_states: Tensor, is_summed: bool = False
    ) -> Tensor:
        """Return the rotary key of the whole sequence, with gradients summed over all ranks' heads.

        Megatron keeps only the gradient of the rank's own heads if the projection is split, or without
        sequence parallelism.

        Args:
            rotary_key: ``[s, b, rope]``; with sequence parallelism and a replicated projection, this rank's
                tokens.
            hidden_states: ``[s, b, hidden]``; under sequence parallelism this rank's tokens.
            is_summed: whether the caller sums the gradient over ranks if no reduce-scatter here does so.
        """
        group = self.tensor_parallel_group()
        if group.size() == 1:
            return rotary_key
        if self.layer.config.sequence_parallel and rotary_key.size(0) == hidden_states.size(0):
            return self._gathered(rotary_key)  # its backward is the reduce-scatter
        if is_summed:
            return rotary_key
        return SumGradients.apply(rotary_key, group)  # type: ignore[no-any-return]

    def rotation(self, length: int, own_part: Callable[[Tensor], Tensor] | None = None) -> Rotate:
        """Return MLA's rotary embedding for states ``[length, b, heads, rope]``.

        The states are a whole sequence, or a context parallel rank's tokens. Megatron's embedding computes
        the angles of the whole sequence and returns those for this context parallel rank.

        Args:
            length: number of tokens of all tensor parallel ranks together.
            own_part: function that slices the angles of all tokens to the states' tokens; default: all
                tokens.
        """
        if self.angles is not None:
            angles, mscale = self.angles[:length], 1.0
        elif self.documents is not None:
            angles, mscale = self.documents.angles(self.layer.rotary_pos_emb)
        else:
            # 8 context parallel ranks with 4096 tokens each: angles for 32,768 positions.
            whole = length * self.context_parallel_group().size()
            angles, mscale = self.layer.rotary_pos_emb(whole), 1.0
            if isinstance(angles, tuple):  # YaRN
                angles, mscale = angles
        angles = angles if own_part is None else own_part(angles)

        apply = self.megatron("core.models.common.embeddings").apply_rotary_pos_emb
        layout = {}
        if "mla_rotary_interleaved" in inspect.signature(apply).parameters:  # before 0.19 it is not an option
            layout["mla_rotary_interleaved"] = True
        config = self.layer.config
        if getattr(config, "apply_rope_fusion", False):
            # Megatron's own MLA has another kernel for that. Here it would rotate halves instead of pairs.
            config = AttributeOverride(config, apply_rope_fusion=False)

        def rotate(states: Tensor) -> Tensor:
            return apply(states, angles, config=config, mscale=mscale, **layout)  # type: ignore[no-any-return]

        return rotate

    def query_parts(self, latent_query: Tensor) -> tuple[Tensor, ...]:
        """Return ``[s, b, heads, qk_head_dim]`` and ``[s, b, heads, rope]``, before rotation."""
        config, heads = self.layer.config, self.layer.num_attention_heads_per_partition
        projection = self.layer.linear_q_proj if config.q_lora_rank is None else self.layer.linear_q_up_proj
        query, _ = projection(latent_query)
        sizes = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        return query.unflatten(-1, (heads, -1)).split(sizes, dim=-1)  # type: ignore[no-any-return]

    def absorbed_query_and_key(
        self, rotate: Rotate, latent_query: Tensor, latent: Tensor, rotary_key: Tensor, up_key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the absorbed query, as latent and rotary part, and the absorbed key of the whole sequence.

        Args:
            rotate: result of :meth:`rotation`.
            latent_query: see :meth:`absorbed_query`.
            latent: ``[s, b, kv_lora_rank]``, normed unless the key-value up-projection contains the norm.
            rotary_key: ``[s, b, rope]`` of the whole sequence.
            up_key: see :meth:`absorbed_query`.

        Returns:
            ``[s, b, heads, kv_lora_rank]``, ``[s, b, heads, rope]`` and ``[s, b, 1, kv_lora_rank + rope]``.
        """
        query = self.absorbed_query(rotate, latent_query, up_key)
        return *query, self.whole_latent_key(rotate, latent, rotary_key)

    def whole_latent_key(self, rotate: Rotate, latent: Tensor, rotary_key: Tensor) -> Tensor:
        """Return the key ``[s, b, 1, kv_lora_rank + rope]`` that all heads and tensor parallel ranks share.

        Args:
            rotate: result of :meth:`rotation`.
            latent: ``[s, b, kv_lora_rank]``, normed unless its up-projection contains the norm.
            rotary_key: ``[s, b, rope]``, of the whole sequence.
        """
        latent = self._normed_latent(latent)
        # All heads of all ranks read this key, so its gradients are summed over ranks.
        group = self.tensor_parallel_group()
        if group.size() > 1:
            if self.layer.config.sequence_parallel:
                latent = self._gathered(latent)
            else:
                latent = SumGradients.apply(latent, group)
        return torch.cat([latent.unsqueeze(2), rotate(rotary_key.unsqueeze(2))], dim=-1)

    def absorbed_query(self, rotate: Rotate, latent_query: Tensor, up_key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the absorbed query of this rank's heads, as latent part and rotary part.

        Args:
            rotate: result of :meth:`rotation`.
            latent_query: ``[s, b, q_lora_rank]``, normed unless the query up-projection contains the norm.
            up_key: key's up-projection, ``[heads, qk_head_dim, kv_lora_rank]``.

        Returns:
            ``[s, b, heads, kv_lora_rank]`` and ``[s, b, heads, rope]``.
        """
        plain, rotary = self.query_parts(latent_query)
        # [s, b, heads, qk_head_dim] x [heads, qk_head_dim, latent]
        return torch.einsum("sbhd,hdc->sbhc", plain, up_key), rotate(rotary)

    def own_absorbed_key(
        self, rotate: Rotate, latent: Tensor, rotary_key: Tensor, hidden_states: Tensor, is_summed: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the absorbed key of the tokens of ``hidden_states``, as latent part and rotary part.

        Args:
            rotate: result of :meth:`rotation` for these tokens.
            latent: ``[s, b, kv_lora_rank]``, normed unless its up-projection contains the norm.
            rotary_key: ``[s, b, rope]``; of the whole sequence if its projection is split over ranks.
            hidden_states: ``[s, b, hidden]``; under sequence parallelism this rank's tokens. The caller then
                also gathers the keys over tensor parallel ranks, and the backward of that gather sums their
                gradients.
            is_summed: see :meth:`rotary_key_for_all_heads`.

        Returns:
            ``[s, b, 1, kv_lora_rank]`` and ``[s, b, 1, rope]``.
        """
        latent = self._normed_latent(latent)
        if self.layer.config.sequence_parallel:
            rotary_key = self.own_part(rotary_key, hidden_states)
        else:
            rotary_key = self.rotary_key_for_all_heads(rotary_key, hidden_states, is_summed)
            group = self.tensor_parallel_group()
            latent = SumGradients.apply(latent, group) if group.size() > 1 else latent
        return latent.unsqueeze(2), rotate(rotary_key.unsqueeze(2))

    def _normed_latent(self, latent: Tensor) -> Tensor:
        """Apply the norm if it is fused into the up-projection, which the absorbed form never calls."""
        up_projection = base_of(self.layer.linear_kv_up_proj)
        if hasattr(up_projection, "layer_norm_weight"):
            return norm_of_fused_layer(up_projection, latent, self.layer.config)
        return latent

    def up_projection(self, who: str, instead: str) -> Tensor:
        """Return the weight of the key-value up-projection, for use without calling the layer.

        Args:
            who: feature that uses the weight, for messages.
            instead: remedy for messages.

        Returns:
            Weight ``[heads * (qk_head_dim + value_dim), kv_lora_rank]`` of this rank's heads. With adapters a
            new tensor, whose gradient reaches both matrices of each.

        Raises:
            ValueError: the layer has further parameters (a bias, DoRA), an adapter with dropout, or stores
                its weight in fp8.
        """
        weight, products = self._up_weight(who, instead)
        return _folded(weight, products).flatten(0, 1)

    def up_projections(self, who: str, instead: str) -> tuple[Tensor, Tensor]:
        """Like :meth:`up_projection`, for key and value apart.

        Returns:
            Key weight ``[heads, qk_head_dim, kv_lora_rank]`` and value weight ``[heads, value_dim,
            kv_lora_rank]``, for this rank's heads. With adapters each is a new tensor, so that a caller who
            needs one of them keeps no more.
        """
        weight, products = self._up_weight(who, instead)
        sizes = [self.layer.config.qk_head_dim, weight.size(1) - self.layer.config.qk_head_dim]
        key, value = (
            _folded(part, [replace(each, up=each.up.split(sizes, dim=1)[number]) for each in products])
            for number, part in enumerate(weight.split(sizes, dim=1))
        )
        return key, value

    def _up_weight(self, who: str, instead: str) -> tuple[Tensor, list[_Product]]:
        """Return the up-projection's own weight by head, and the products that active adapters add to it."""
        layer = self.layer.linear_kv_up_proj
        for module in layer.modules():
            wait_for_weights(module)  # the layer itself is never called
        base = base_of(layer)
        # A bias would be ignored, because only `weight` is read.
        parameters = {name for name, _ in base.named_parameters()}
        if parameters - {"weight", "layer_norm_weight", "layer_norm_bias"} or "weight" not in parameters:
            raise ValueError(
                f"{who}: linear_kv_up_proj holds {', '.join(sorted(parameters)) or 'no parameters'}, and "
                f"only a plain weight is supported; {instead}"
            )
        try:
            adapters = adapters_of(layer)
        except ValueError as error:
            raise ValueError(f"{who}: linear_kv_up_proj: {error}, or {instead}") from None
        matrices = [module.weight for adapter in adapters for module in (adapter.down, adapter.up)]
        for weight in (base.weight, *matrices):
            if type(weight) not in (torch.nn.Parameter, Tensor):
                raise ValueError(
                    f"{who}: linear_kv_up_proj keeps its weight as {type(weight).__name__}, and only plain "
                    f"tensors are supported; {instead}, or omit --fp8-param-gather"
                )
        # [heads * (qk_head_dim + value_dim), n] -> [heads, qk_head_dim + value_dim, n]
        heads = (self.layer.num_attention_heads_per_partition, -1)
        products = [
            _Product(each.up.weight.unflatten(0, heads), self._whole_down(each), each.scale)
            for each in adapters
        ]
        return base.weight.unflatten(0, heads), products

    def _whole_down(self, adapter: LowRank) -> Tensor:
        """Return an adapter's matrix A, whose gradient is summed over the heads of all ranks."""
        down: Tensor = adapter.down.weight
        group = self.tensor_parallel_group()
        if down.size(0) < adapter.up.weight.size(1):  # ranks split its rows, as in Megatron-Bridge
            return self._gathered(down)
        later = self.layer.config.sequence_parallel and getattr(down, "sequence_parallel", False)
        # Megatron itself sums the gradients of weights that are marked as sequence parallel.
        return down if group.size() == 1 or later else SumGradients.apply(down, group)

    def recomputed_if_asked(self, derive: Callable[..., Any], *parts: Tensor) -> Any:
        """Call ``derive``; checkpoint it without output if Megatron recomputes ``mla_up_proj``."""
        if not getattr(self.layer, "recompute_up_proj", False):
            return derive(*parts)
        make, config = self.megatron("core.tensor_parallel").CheckpointWithoutOutput, self.layer.config
        quantised = {}
        if "fp8" in inspect.signature(make).parameters:  # since 0.13; off is None, False would count as on
            quantised["fp8"] = config.fp8 or getattr(config, "fp4", None)
        checkpoint = self.layer.qkv_up_checkpoint = make(**quantised)
        return checkpoint.checkpoint(derive, *parts)

    def _gathered(self, states: Tensor) -> Tensor:
        """All-gather the first dimension over tensor parallel ranks; backward reduce-scatters."""
        gather = self.megatron("core.tensor_parallel").gather_from_sequence_parallel_region
        return gather(states, group=self.tensor_parallel_group())  # type: ignore[no-any-return]

    def _group_of_its_own(self, name: str) -> ProcessGroup | None:
        # pg_collection since 0.15, model_comm_pgs in 0.13 and 0.14, neither in 0.12.
        groups = getattr(self.layer, "pg_collection", None) or getattr(self.layer, "model_comm_pgs", None)
        return getattr(groups, name, None)

    def _group_argument(self) -> dict[str, ProcessGroup]:
        """Return ``{"group": ...}`` for Megatron's mappings if the layer has its own group (not in 0.12)."""
        group = self._group_of_its_own("tp")
        return {} if group is None else {"group": group}


@dataclass(frozen=True)
class _Product:
    """Product ``scale * up @ down``: ``up`` ``[heads, dim, rank]`` by head, ``down`` ``[rank, in]``."""

    up: Tensor
    down: Tensor
    scale: float


def _folded(weight: Tensor, products: Sequence[_Product]) -> Tensor:
    """Return the weight of each head ``[heads, dim, in]`` plus the products, in the weight's dtype."""
    dtype = weight.dtype
    for product in products:
        down = product.down.expand(weight.size(0), -1, -1)
        # The product is never stored apart, and backward keeps only the two matrices.
        weight = torch.baddbmm(weight.to(down.dtype), product.up, down, alpha=product.scale)
    return weight.to(dtype)


def derived_by(
    original: Callable[..., Any], derive: Callable[[Any, Tensor, Any, bool], Any]
) -> Callable[..., Any]:
    """Wrap ``MLASelfAttention.get_query_key_value_tensors`` so that ``derive`` may compute its result.

    Args:
        original: Megatron's method.
        derive: function of the layer, its hidden states, the description of packed documents, and a flag
            whether the call is for generation. Returns the result, or ``None`` to call the original.
    """

    def get_query_key_value_tensors(
        self: Any,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Inference arguments differ between releases, so any further argument counts.
        generates = any(other is not None for other in (inference_context, *args, *kwargs.values()))
        derived = derive(self, hidden_states, packed_seq_params, generates)
        if derived is not None:
            return derived
        return original(
            self,
            hidden_states,
            key_value_states,
            position_ids,
            packed_seq_params,
            inference_context,
            *args,
            **kwargs,
        )

    return get_query_key_value_tensors


class SumGradients(Function):
    """Identity in forward, all-reduce of the gradient in backward.

    Megatron's ``copy_to_tensor_model_parallel_region`` all-reduces a contiguous copy of the gradient and
    returns the original. The sum is then lost if the gradient is a slice of a larger tensor, as it is here.
    """

    @staticmethod
    def forward(ctx: Any, activation: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return activation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A contiguous copy, because the gradient may be a slice of a larger tensor.
        gradient = gradient.clone(memory_format=contiguous_format)
        all_reduce(gradient, group=ctx.group)
        return gradient, None


# -- compiled steps, which one feature provides for a layer and another one uses --------------------


@dataclass(frozen=True)
class CompiledSteps:
    """Compiled functions before and after attention that a layer may call instead of separate operators.

    Attributes:
        prolog: function of an ``MLASelfAttention``, its hidden states ``[s, b, hidden]`` and the key's
            up-projection ``[heads, qk_head_dim, kv_lora_rank]``. Returns the absorbed query
            ``[s, b, heads, kv_lora_rank + rope]``, the absorbed key ``[s, b, 1, kv_lora_rank + rope]``, the
            latent query and the latent key-value, in the order of ``get_query_key_value_tensors``. Returns
            ``None`` for a layer that it does not support.
        epilog: function of the attention output over latents ``[b, s, heads, kv_lora_rank]`` and the
            value's up-projection ``[heads, value_dim, kv_lora_rank]``; returns
            ``[s, b, heads * value_dim]``.
    """

    prolog: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor] | None]
    epilog: Callable[[Tensor, Tensor], Tensor]


_steps: WeakKeyDictionary[Any, CompiledSteps] = WeakKeyDictionary()


def offer(layer: Any, steps: CompiledSteps) -> None:
    """Register compiled steps for a layer. They must not refer to the layer, which would keep it alive."""
    _steps[layer] = steps


def steps_of(layer: Any) -> CompiledSteps | None:
    """Return the compiled functions registered for a layer with :func:`offer`, or ``None``."""
    return _steps.get(layer)
