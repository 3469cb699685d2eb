"""Compiled prolog (hidden states to query, key, value) and epilog of multi-head latent attention.

With tensor parallel size 1 the prolog is one graph. Otherwise the up-projections communicate, so they run
eagerly between two graphs: one computes the latents, the other starts from the up-projections' outputs.
Linear layers that do more than a matmul also run eagerly between graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.compilation.regions import latent_math
from mindspeed_dsa.features.compilation.regions.latent_math import Down, Sizes
from mindspeed_dsa.features.compilation.regions.region import Regions, open_rows, regions_of, rows_of
from mindspeed_dsa.megatron.adapters import base_of
from mindspeed_dsa.megatron.inlinable import NO_NORM, Linear, linear_of, norm_of
from mindspeed_dsa.megatron.local_modules import norm_of_fused_layer
from mindspeed_dsa.megatron.mla_projections import CompiledSteps, derived_by, offer

PROLOG, EPILOG = "prolog of latent attention", "epilog of latent attention"


def offer_to_attention(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``MLASelfAttention.__init__`` to register a compiled prolog and epilog (absorbed form)."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        regions = regions_of(context)

        def prolog(layer: Any, hidden: Tensor, up_key: Tensor) -> Any:
            return _absorbed(regions, context.megatron, layer, hidden, up_key)

        def epilog(attended: Tensor, up_value: Tensor) -> Tensor:
            return _epilog(regions, attended, up_value)

        steps = CompiledSteps(prolog, epilog)
        offer(self, steps)
        offer(self.core_attention, steps)

    return __init__


def compile_prolog(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``MLASelfAttention.get_query_key_value_tensors`` (unabsorbed form) to run compiled."""
    regions = regions_of(context)

    def derive(layer: Any, hidden_states: Tensor, packed_seq_params: Any, generates: bool) -> Any:
        if generates or packed_seq_params is not None:
            return None
        return _by_head(regions, context.megatron, layer, hidden_states)

    return derived_by(original, derive)


def compile_absorbed_prolog(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``AbsorbedMLASelfAttention.get_query_key_value_tensors`` (since 0.19) to run compiled."""
    regions = regions_of(context)

    def get_query_key_value_tensors(
        self: Any,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        derived = None
        if packed_seq_params is None and inference_context is None and not any(kwargs.values()):
            up_key, _ = self._get_kv_up_weights()
            derived = _absorbed(regions, context.megatron, self, hidden_states, up_key)
        if derived is None:
            return original(
                self, hidden_states, key_value_states, packed_seq_params, inference_context, **kwargs
            )
        query, key, latent_query, _ = derived
        return query, key, latent_query

    return get_query_key_value_tensors


def _why_not(layer: Any) -> str | None:
    """Return a setting of the layer that the compiled graphs do not support, or None."""
    config = layer.config
    if not hasattr(layer, "linear_kv_down_proj"):
        return "its down-projections are one product"  # --mla-down-proj-fusion
    for name in ("cache_mla_latents", "apply_rope_fusion", "rotary_interleaved", "fp8", "fp4"):
        if getattr(config, name, None):
            return f"{name} is on"
    if getattr(config, "rotary_percent", 1.0) != 1:
        return "a part of the rotary dimensions is rotated"
    if getattr(layer, "offload_qkv_linear", False):
        return "its activations are moved to the host"
    return None


class _Layer:
    """Weights and sizes of one attention layer, collected for one call."""

    def __init__(self, layer: Any, megatron: Megatron) -> None:
        config, self.module = layer.config, layer
        self._megatron = megatron
        has_latent = config.q_lora_rank is not None
        self.query_up = layer.linear_q_up_proj if has_latent else layer.linear_q_proj
        self.query_down = layer.linear_q_down_proj if has_latent else None
        query_norm = norm_of(layer.q_layernorm, megatron) if has_latent else None
        key_norm = norm_of(layer.kv_layernorm, megatron)
        self.knows_norms = key_norm is not None and (query_norm is not None) == has_latent
        self.down = Down(
            linear_of(self.query_down, megatron) if has_latent else None,
            linear_of(layer.linear_kv_down_proj, megatron),
            query_norm,
            key_norm or NO_NORM,
        )
        self.up = (linear_of(self.query_up, megatron), linear_of(layer.linear_kv_up_proj, megatron))
        self.sizes = Sizes(
            layer.num_attention_heads_per_partition,
            config.qk_head_dim,
            config.qk_pos_emb_head_dim,
            config.v_head_dim,
            config.kv_lora_rank,
        )

    def why_not(self) -> str | None:
        """Return why the layer's modules cannot be compiled, or None."""
        layer, config = self.module, self.module.config
        if not self.knows_norms:
            return "it does not know the norms of latents"
        # A complete down-projection has 512 + 64 rows; fewer rows mean that ranks split it.
        wide = config.kv_lora_rank + config.qk_pos_emb_head_dim
        if base_of(layer.linear_kv_down_proj).weight.size(0) != wide or (
            self.query_down is not None and base_of(self.query_down).weight.size(0) != config.q_lora_rank
        ):
            return "its down-projections are split over tensor parallel ranks"
        edges = self.down.key is None or (self.query_down is not None and self.down.query is None)
        if edges and config.tensor_model_parallel_size > 1:
            return "its down-projections do more than multiply, on several tensor parallel ranks"
        return None

    @property
    def is_whole(self) -> bool:
        """Return whether one graph can contain the complete prolog."""
        downs = self.down.key is not None and (self.query_down is None or self.down.query is not None)
        recomputed = getattr(self.module, "recompute_up_proj", False)
        return downs and None not in self.up and not recomputed

    def latents(self, regions: Regions, hidden: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return query latent, key-value latent and rotary key, ``[s, b, ...]``, for this rank's tokens."""
        query_source = key_source = hidden
        if self.query_down is not None and self.down.query is None:
            query_source = self.query_down(hidden)[0]
        if self.down.key is None:
            key_source = self.module.linear_kv_down_proj(hidden)[0]
        region = regions.of(f"{PROLOG}, latents", latent_math.latents, rows=2)
        rows = rows_of(hidden)
        result = region(
            rows if query_source is hidden else rows_of(query_source),
            rows if key_source is hidden else rows_of(key_source),
            self.down,
            self.sizes,
        )
        return _split(result, hidden)  # type: ignore[no-any-return]

    def whole_rotary_key(self, rotary_key: Tensor) -> Tensor:
        """Gather the rotary key of the full sequence, ``[s, b, rotary]``, under sequence parallelism."""
        return self.gathered(rotary_key) if self.module.config.sequence_parallel else rotary_key

    def gathered(self, states: Tensor) -> Tensor:
        """All-gather ``states`` along the sequence over tensor parallel ranks; backward reduce-scatters."""
        if self.module.config.tensor_model_parallel_size == 1:
            return states
        gather = self._megatron("core.tensor_parallel").gather_from_sequence_parallel_region
        return gather(states, group=self.module.pg_collection.tp)  # type: ignore[no-any-return]

    def recomputed_if_asked(self, derive: Callable[..., Any], *parts: Tensor) -> Any:
        """Run ``derive``, under Megatron's checkpoint if ``--recompute-modules`` has ``mla_up_proj``."""
        if not getattr(self.module, "recompute_up_proj", False):
            return derive(*parts)
        checkpoint = self._megatron("core.tensor_parallel").CheckpointWithoutOutput(fp8=None)
        self.module.qkv_up_checkpoint = checkpoint
        return checkpoint.checkpoint(derive, *parts)


def _by_head(regions: Regions, megatron: Megatron, module: Any, hidden: Tensor) -> Any:
    """Run the compiled prolog of unabsorbed attention; return None if the layer is not supported."""
    if not regions.usable(hidden):
        return None
    # Asked first: layers that are not supported may lack what _Layer collects.
    reason = _why_not(module)
    if reason is None:
        layer = _Layer(module, megatron)
        reason = layer.why_not()
    if reason is not None:
        regions.declined(PROLOG, reason)
        return None
    sizes = layer.sizes
    if layer.is_whole:
        cos, sin = _tables.of(module, hidden, hidden.size(0))
        region = regions.of(f"{PROLOG} by head", latent_math.whole_by_head)
        query, key, value, latent_query, latent = _split(
            region(rows_of(hidden), layer.down, *layer.up, cos, sin, sizes), hidden
        )
        return query, key, value, hidden if latent_query is None else latent_query, latent

    latent_query, latent, rotary_key = layer.latents(regions, hidden)
    latent_query = hidden if latent_query is None else latent_query
    rotary_key = layer.whole_rotary_key(rotary_key)
    cos, sin = _tables.of(module, rotary_key, rotary_key.size(0))
    region = regions.of(f"{PROLOG} by head, heads", latent_math.by_head, rows=3)

    def derive(latent_query: Tensor, latent: Tensor, rotary_key: Tensor) -> Any:
        query_up, key_up = layer.up
        query = latent_query if query_up is not None else layer.query_up(latent_query)[0]
        pair = latent if key_up is not None else module.linear_kv_up_proj(latent)[0]
        found = region(rows_of(query), rows_of(pair), rows_of(rotary_key), query_up, key_up, cos, sin, sizes)
        return _split(found, rotary_key)

    query, key, value = layer.recomputed_if_asked(derive, latent_query, latent, rotary_key)
    return query, key, value, latent_query, latent


def _absorbed(
    regions: Regions, megatron: Megatron, module: Any, hidden: Tensor, up_key: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Run the compiled prolog of absorbed attention; see ``CompiledSteps.prolog``."""
    if not regions.usable(hidden):
        return None
    config, reason = module.config, _why_not(module)
    if reason is None:
        layer = _Layer(module, megatron)
        reason = layer.why_not()
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        reason = reason or "tensor parallel ranks sum its gradients without sequence parallelism"
    if reason is not None:
        regions.declined(PROLOG, reason)
        return None
    # The key's up-projection is not called in this form. A norm fused into it is a part of the graph, or runs
    # before the latents are gathered.
    key_up, sizes = layer.up[1], layer.sizes
    if layer.is_whole and key_up is not None:
        cos, sin = _tables.of(module, hidden, hidden.size(0))
        region = regions.of(f"{PROLOG} in absorbed form", latent_math.whole_absorbed)
        query, key, latent_query, latent = _split(
            region(rows_of(hidden), layer.down, layer.up[0], key_up.norm, up_key, cos, sin, sizes), hidden
        )
        return query, key, hidden if latent_query is None else latent_query, latent

    latent_query, latent, rotary_key = layer.latents(regions, hidden)
    latent_query = hidden if latent_query is None else latent_query
    normed = latent
    up_projection = base_of(module.linear_kv_up_proj)
    if hasattr(up_projection, "layer_norm_weight"):
        normed = norm_of_fused_layer(up_projection, latent, config)
    rotary_key, whole_latent = layer.whole_rotary_key(rotary_key), layer.gathered(normed)
    cos, sin = _tables.of(module, rotary_key, rotary_key.size(0))
    region = regions.of(f"{PROLOG} in absorbed form, heads", latent_math.absorbed, rows=3)

    def derive(latent_query: Tensor, latent: Tensor, rotary_key: Tensor, up_key: Tensor) -> Any:
        query_up: Linear | None = layer.up[0]
        query = latent_query if query_up is not None else layer.query_up(latent_query)[0]
        heads = region(
            rows_of(query), rows_of(latent), rows_of(rotary_key), query_up, up_key, cos, sin, sizes
        )
        return _split(heads, rotary_key)

    query, key = layer.recomputed_if_asked(derive, latent_query, whole_latent, rotary_key, up_key)
    return query, key, latent_query, latent


def _epilog(regions: Regions, attended: Tensor, up_value: Tensor) -> Tensor:
    """Run the compiled epilog of absorbed attention; see ``CompiledSteps.epilog``."""
    if not regions.usable(attended):
        return torch.einsum("bshc,hdc->sbhd", attended, up_value).flatten(2)
    region = regions.of(EPILOG, latent_math.up_projected)
    return region(rows_of(attended), up_value).unflatten(0, attended.shape[:2]).transpose(0, 1)  # type: ignore[no-any-return]


def _split(found: tuple[Tensor | None, ...], like: Tensor) -> Any:
    """Reshape each tensor ``[s * b, ...]`` to ``[s, b, ...]``, with ``s`` and ``b`` from ``like``."""
    shape = like.shape[:2]
    return tuple([rows if rows is None else rows.view(*shape, *rows.shape[1:]) for rows in found])


class _Tables:
    """Cache of cosines and sines ``[s * b, rotary]``, one entry per layer, for its last sequence length.

    Megatron caches the angles of each length, so an entry is valid only for the identical angles tensor.
    """

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Any, tuple[Any, Tensor, Tensor, Tensor]] = WeakKeyDictionary()

    def of(self, module: Any, states: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines in the dtype of ``states``, for ``length`` tokens of this rank."""
        ranks = module.config.context_parallel_size
        angles, mscale = module.rotary_pos_emb(length * ranks), 1.0
        if isinstance(angles, tuple):  # YaRN
            angles, mscale = angles
        key = (length, states.size(1), states.dtype, mscale)
        known = self._last.get(module)
        if known is not None and known[0] == key and known[1] is angles:
            return known[2], known[3]
        # As in Megatron, multiply with mscale in the angles' precision, then convert to the states' dtype.
        with torch.inference_mode(False):  # tensors cached by an evaluation are used in training, too
            rows = angles[:length].reshape(length, 1, -1)
            tables = [
                open_rows(
                    (function(rows) * mscale)
                    .to(states.dtype)
                    .expand(-1, states.size(1), -1)
                    .reshape(-1, rows.size(-1))
                )
                for function in (torch.cos, torch.sin)
            ]
        self._last[module] = (key, angles, tables[0], tables[1])
        return tables[0], tables[1]


_tables = _Tables()
