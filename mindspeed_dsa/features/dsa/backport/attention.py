"""Backport of Megatron-core 0.16's DSA modules, with the same names, parameters and shapes.

The modules always run on the operators of ``mindspeed_dsa.ops``. Tensors are in Megatron's layout, sequence
first. ``s`` is the whole sequence, or a rank's shard of it where sequence parallelism is mentioned.

Imports Megatron only when called, because these functions are loaded while Megatron is being imported.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.dsa import core_attention
from mindspeed_dsa.features.dsa.backport.feature import Options
from mindspeed_dsa.features.dsa.call import call_of
from mindspeed_dsa.features.dsa.index_projection import angles_of_rows
from mindspeed_dsa.features.dsa.indexer_loss import coefficient, with_zero_gradients
from mindspeed_dsa.features.dsa.key_exchange.exchange import key_exchange
from mindspeed_dsa.features.dsa.key_exchange.layers import (
    projects_own_rows,
    recomputes,
    sum_gradients,
    with_whole_key,
)
from mindspeed_dsa.features.dsa.model.indexer import (
    LayerNormInFP32,
    key_norm_epsilon,
    rotate_first_dimensions,
)
from mindspeed_dsa.features.dsa.model.uninitialised import initialising
from mindspeed_dsa.features.dsa.repairs.indexer import hadamard_rotation
from mindspeed_dsa.megatron.local_modules import SequenceParallelLayerNorm, duplicated_linear

try:
    from fast_hadamard_transform import hadamard_transform  # type: ignore[import-not-found]
except ImportError:
    hadamard_transform = None


def rotate_activation(x: Tensor) -> Tensor:
    """Multiply the last dimension by the orthonormal Hadamard matrix. Shape and dtype are unchanged."""
    if x.is_cuda and x.dtype == torch.bfloat16 and hadamard_transform is not None:
        rotated: Tensor = hadamard_transform(x, scale=x.size(-1) ** -0.5)
        return rotated
    return hadamard_rotation(x)


@dataclass
class DSAIndexerSubmodules:
    """Specs of the indexer's modules."""

    linear_wq_b: Any = None
    linear_wk: Any = None
    k_norm: Any = None
    linear_weights_proj: Any = None


@dataclass
class DSAttentionSubmodules:
    """Specs of the core attention's modules."""

    indexer: Any = None


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups that DSA uses, under the names of Megatron's ``ProcessGroupCollection``."""

    tp: ProcessGroup
    cp: ProcessGroup

    @classmethod
    def of(cls, megatron: Megatron, passed: Any = None) -> ProcessGroups:
        """Return the process groups passed to a module (0.13 and later), otherwise Megatron's global ones."""
        state = megatron("core.parallel_state")
        tp, cp = getattr(passed, "tp", None), getattr(passed, "cp", None)
        return cls(
            tp=state.get_tensor_model_parallel_group() if tp is None else tp,
            cp=state.get_context_parallel_group() if cp is None else cp,
        )


class Indexer(torch.nn.Module):
    """Lightning Indexer: projects hidden states to the query, key and head weights of the index scores.

    Replicated on every tensor parallel rank. Each rank sees the whole sequence and computes the full
    gradient, so parameters are marked to be averaged instead of summed over tensor parallel ranks.

    Args:
        config: Megatron's configuration, with the fields of :class:`.job.DSAFields` and of the feature
            ``dsa-model``.
        submodules: specs of the four modules.
        pg_collection: Megatron's process groups; None: the groups of ``parallel_state``.
    """

    megatron: ClassVar[Megatron]
    rotate_activation = staticmethod(rotate_activation)
    config: Any

    def __init__(
        self,
        config: Any,
        submodules: DSAIndexerSubmodules,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.hidden_size = config.hidden_size
        self.qk_pos_emb_head_dim = config.qk_pos_emb_head_dim
        self.q_lora_rank = config.hidden_size if config.q_lora_rank is None else config.q_lora_rank
        self.index_n_heads = config.dsa_indexer_n_heads
        self.index_head_dim = config.dsa_indexer_head_dim
        self.index_topk = config.dsa_indexer_topk
        self.softmax_scale = self.index_head_dim**-0.5
        self.pg_collection = ProcessGroups.of(self.megatron, pg_collection)
        self.rotary_pos_emb = _rotary_embedding(self.megatron, config, self.pg_collection.cp)

        build_module = self.megatron("core.transformer.spec_utils").build_module

        def linear(module: Any, size_in: int, size_out: int) -> Any:
            return build_module(
                module,
                size_in,
                size_out,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                skip_weight_param_allocation=False,
                parallel_mode="duplicated",
            )

        # Also with --no-initialization: a dense model's checkpoint has no indexer weights.
        with initialising(config):
            self.linear_wq_b = linear(
                submodules.linear_wq_b, self.q_lora_rank, self.index_n_heads * self.index_head_dim
            )
            self.linear_wk = linear(submodules.linear_wk, self.hidden_size, self.index_head_dim)
            k_norm = LayerNormInFP32 if config.dsa_indexer_k_norm_fp32 else submodules.k_norm
            self.k_norm = build_module(
                k_norm, config=config, hidden_size=self.index_head_dim, eps=key_norm_epsilon(config)
            ).to(config.params_dtype)
            self.linear_weights_proj = linear(
                submodules.linear_weights_proj, self.hidden_size, self.index_n_heads
            )
        for parameter in self.parameters():
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
        # Under context and sequence parallelism, key and weights are projected from this rank's shard only.
        if projects_own_rows(self):
            sum_gradients(self)

    def forward_before_topk(
        self, x: Tensor, qr: Tensor, packed_seq_params: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the indexer's query, key and head weights.

        Args:
            x: hidden states ``[s, b, hidden]`` of this context parallel rank, a shard of them under sequence
                parallelism.
            qr: latent query ``[s, b, q_lora_rank]``, sharded like ``x``.
            packed_seq_params: ignored; callers with packed documents set the rotary angles themselves.

        Returns:
            Query ``[s, b, heads, head_dim]``, key ``[s, b, head_dim]`` and weights ``[s, b, heads]``, with
            all scales multiplied in.
        """
        if self.config.sequence_parallel and self.pg_collection.tp.size() > 1:
            gather = self.megatron("core.tensor_parallel").gather_from_sequence_parallel_region
            x, qr = gather(x), gather(qr)
        # rotary_pos_emb takes the length of the whole sequence and returns the angles of this rank's tokens.
        angles, mscale = self.rotary_pos_emb(x.size(0) * self.pg_collection.cp.size()), 1.0
        if isinstance(angles, tuple):  # YaRN
            angles, mscale = angles
        angles = angles_of_rows(self, angles)
        # [s, b, heads * head_dim] -> [s, b, heads, head_dim]
        query = self.linear_wq_b(qr)[0].unflatten(-1, (self.index_n_heads, self.index_head_dim))
        key = self.k_norm(self.linear_wk(x)[0]).unsqueeze(2)  # [s, b, 1, head_dim]
        query = self._apply_rope(query, angles, mscale)
        key = self._apply_rope(key, angles, mscale).squeeze(2)  # [s, b, head_dim]
        if self.config.dsa_indexer_rotate_activation:
            query, key = rotate_activation(query), rotate_activation(key)
        # [s, b, heads]
        weights = self.linear_weights_proj(x)[0] * (self.index_n_heads**-0.5 * self.softmax_scale)
        return query, key, weights

    def _apply_rope(self, x: Tensor, rotary_pos_emb: Tensor, mscale: float) -> Tensor:
        """Rotate the first or the last dimensions of ``[s, b, heads, head_dim]``, as configured."""
        if self.config.dsa_indexer_rope_first:
            return rotate_first_dimensions(self.megatron, self, x, rotary_pos_emb, mscale)
        plain, rotary = x.split(
            [self.index_head_dim - self.qk_pos_emb_head_dim, self.qk_pos_emb_head_dim], dim=-1
        )
        rotate = self.megatron("core.models.common.embeddings").apply_rotary_pos_emb
        return torch.cat([plain, rotate(rotary, rotary_pos_emb, config=self.config, mscale=mscale)], dim=-1)


class Attention(torch.nn.Module):
    """Core attention over the keys that the indexer selects.

    The constructor has the arguments of Megatron's core attentions, and ``options``. In Megatron
    before 0.16, attention layers do not pass the indexer's inputs ``x`` and ``qr`` to ``forward``; they can
    be set before the call with :meth:`hand_over`.
    """

    megatron: ClassVar[Megatron]
    config: Any

    def __init__(
        self,
        config: Any,
        submodules: DSAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        model_comm_pgs: Any = None,
        *,
        options: Options,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.options = layer_number, options
        build_module = self.megatron("core.transformer.spec_utils").build_module
        self.indexer = build_module(
            submodules.indexer, config=config, pg_collection=pg_collection or model_comm_pgs
        )
        self.softmax_scale = (
            (k_channels or config.kv_channels) ** -0.5 if softmax_scale is None else softmax_scale
        )
        self._handed_over: tuple[Tensor, Tensor] | None = None

    def hand_over(self, x: Tensor, qr: Tensor) -> None:
        """Set the indexer's inputs for the next call of :meth:`forward`, which documents their shapes."""
        self._handed_over = (x, qr)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        x: Tensor | None = None,
        qr: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Compute causal attention to the selected keys.

        Args:
            query: ``[s, b, heads, dim]``, this rank's heads.
            key: ``[s, b, heads, dim]``, or ``[s, b, 1, dim]`` in absorbed form.
            value: ``[s, b, heads, value_dim]``, or the up-projection ``[heads, value_dim, latent]`` in
                absorbed form.
            attention_mask: ignored, attention is causal.
            x: hidden states ``[s, b, hidden]``, a rank's shard under sequence parallelism.
            qr: latent query ``[s, b, q_lora_rank]``, sharded like ``x``.
            attn_mask_type: mask type, causal or None.
            attention_bias: must be None.
            packed_seq_params: Megatron's description of documents, for a batch of 1, or None.

        Returns:
            Attention output ``[s, b, heads * value_dim]``.

        Raises:
            RuntimeError: ``x`` and ``qr`` were neither passed nor set with :meth:`hand_over`.
            ValueError: the mask type is not causal, or there is a bias.
        """
        if x is None or qr is None:
            if self._handed_over is None:
                raise RuntimeError(
                    "DSAttention: neither got x and qr nor were they handed over; build it into an "
                    "MLASelfAttention while dsa-backport is on"
                )
            x, qr = self._handed_over
        # Set for one call only: the module must not keep the tensors alive.
        self._handed_over = None
        # The indexer loss must not train the rest of the model.
        x, qr = x.detach(), qr.detach()
        kind = getattr(attn_mask_type, "name", "causal")
        if kind not in ("causal", "padding_causal") or attention_bias is not None:
            raise ValueError(
                f"DSAttention: got attn_mask_type {kind}, attention_bias {attention_bias is not None}; "
                "it has causal attention without a bias"
            )
        if self.training and torch.is_grad_enabled() and recomputes(self.config):
            # The checkpointed forward runs without gradients and skips the indexer loss. Only the
            # recomputation computes it.
            checkpoint = self.megatron("core.tensor_parallel").checkpoint
            exchange = key_exchange(self, self.options.dsa, self.megatron)
            again = partial(self._attend, packed_seq_params)

            def attend(key: Tensor) -> Tensor:
                return checkpoint(again, False, query, key, value, x, qr)  # type: ignore[no-any-return]

            return attend(key) if exchange is None else with_whole_key(exchange, key, attend)
        return self._attend(packed_seq_params, query, key, value, x, qr)

    def _attend(
        self, packed_seq_params: Any, query: Tensor, key: Tensor, value: Tensor, x: Tensor, qr: Tensor
    ) -> Tensor:
        call = call_of(self, query, key, value, x, qr, self.options.dsa, self.megatron, packed_seq_params)
        out = core_attention.attend(call)
        # Without a loss, indexer parameters get zero gradients: overlapped gradient reduction waits for them.
        if self.training and torch.is_grad_enabled() and coefficient(self.config) == 0:
            return out if self.indexer is None else with_zero_gradients(out, self.indexer)
        return out


class Classes(NamedTuple):
    """DSA module classes, derived from one Megatron's ``MegatronModule``."""

    attention: type
    indexer: type


@cache
def dsa_classes(megatron: Megatron) -> Classes:
    """Build subclasses of a Megatron's ``MegatronModule`` for DSA, named as in Megatron-core 0.16."""
    base: Any = megatron("core.transformer.module").MegatronModule

    class DSAttention(Attention, base):
        __doc__ = Attention.__doc__

    class DSAIndexer(Indexer, base):
        __doc__ = Indexer.__doc__

    DSAttention.megatron = DSAIndexer.megatron = megatron
    return Classes(DSAttention, DSAIndexer)


def core_attention_spec(options: Options, megatron: Megatron) -> Any:
    """Build the module spec of a DSA core attention, without Transformer Engine's modules."""
    spec, classes = megatron("core.transformer.spec_utils").ModuleSpec, dsa_classes(megatron)
    linear = duplicated_linear(megatron)
    return spec(
        module=classes.attention,
        params={"options": options},
        submodules=DSAttentionSubmodules(
            indexer=spec(
                module=classes.indexer,
                submodules=DSAIndexerSubmodules(
                    linear_wq_b=linear,
                    linear_wk=linear,
                    k_norm=SequenceParallelLayerNorm,
                    linear_weights_proj=linear,
                ),
            )
        ),
    )


def _rotary_embedding(megatron: Megatron, config: Any, cp_group: ProcessGroup) -> Any:
    """Build MLA's rotary embedding (RoPE or YaRN), which returns this context parallel rank's angles."""
    embeddings = megatron("core.models.common.embeddings")
    plain, yarn = embeddings.RotaryEmbedding, embeddings.YarnRotaryEmbedding
    # Before 0.14 the embedding takes the group from parallel_state.
    group = {"cp_group": cp_group} if "cp_group" in inspect.signature(plain).parameters else {}
    if config.rope_type == "rope":
        return plain(
            config.qk_pos_emb_head_dim,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            **group,
        )
    # Renamed in 0.14, when max_position_embeddings got another meaning.
    stretched = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    same_names = ("rotary_base", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return yarn(
        config.qk_pos_emb_head_dim,
        scaling_factor=config.rotary_scaling_factor,
        original_max_position_embeddings=stretched,
        **{name: getattr(config, name) for name in same_names},
        **group,
    )
