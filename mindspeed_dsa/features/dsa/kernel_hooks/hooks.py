"""Our DSA kernel backend for Megatron-core 0.19: patches that select it, and its hook functions.

Tensors are in Megatron's layout, sequence first. If a hook returns ``None``, Megatron calls the next hook, or
finally its own PyTorch code. A row is a query token. It sees the keys ``starts <= index < ends``, in the
order of ``k``. These ranges cover causal masks, packed documents and context parallelism, so Megatron's other
arguments about packing are ignored.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.kernel_hooks.feature import Options, refusals
from mindspeed_dsa.features.dsa.loss import sparse_loss
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import Groups, IndexInputs, LossOptions, Problem, Rows
from mindspeed_dsa.features.dsa.sparse_attention import select_keys, sparse_attention
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention

NAME = "mindspeed"
"""Name of our kernel backend."""
# A type object, not a string: Megatron-LM reads a flag's choices from it.
_CHOICES = Literal["none", "tilelang", "cudnn", "mindspeed"]
FIELD = fields(make_dataclass("_Choice", [("dsa_kernel_backend", _CHOICES, field(default="none"))]))[0]
"""Field of the configuration with our backend as an additional choice."""
HOOKS = (
    "run_fused_qk_topk",
    "run_fused_qk_topk_with_loss",
    "run_fused_absorbed_sparse_attention",
    "run_fused_dsa_attention",
)
_NO_VALUE = torch.empty(0, 0, 0)
"""Placeholder value for a loss without attention. Its three dimensions mark the operands as absorbed."""


# -- selection of the backend ------------------------------------------------------------------


def accept_our_backend(original: Callable[[str], None]) -> Callable[[str], None]:
    """Decorate ``_validate_dsa_kernel_backend_dependencies`` to accept our backend without CUDA."""

    def _validate_dsa_kernel_backend_dependencies(dsa_kernel_backend: str) -> None:
        if dsa_kernel_backend != NAME:
            original(dsa_kernel_backend)

    return _validate_dsa_kernel_backend_dependencies


def choose_our_backend(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__`` to select our backend in DSA models.

    Raises ValueError if the configuration names another backend.
    """

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.experimental_attention_variant == "dsa":
            problems = refusals(context.options)
            if self.dsa_kernel_backend not in ("none", NAME):
                problems.append(
                    f"dsa_kernel_backend={self.dsa_kernel_backend!r} selects other kernels than "
                    "--use-fused-dsa; omit one of them"
                )
            if getattr(self.attention_backend, "name", self.attention_backend) == "unfused":
                problems.append(
                    "with attention_backend=unfused Megatron queries no kernel backend; use "
                    "--attention-backend auto or omit --use-fused-dsa"
                )
            if problems:
                raise ValueError("mindspeed_dsa: dsa-kernel-backend: " + "; ".join(problems))
            self.dsa_kernel_backend = NAME
        original(self, *args, **kwargs)

    return __post_init__


def module_name(context: Context[Options]) -> str:
    """Return the backend's module name, which Megatron finds in its table of backends and imports."""
    return backend_module(context.options).__name__


@cache
def backend_module(options: Options) -> ModuleType:
    """Create a module whose functions are the hooks, bound to these options.

    Megatron caches the last imported module by name, so different options need different names.
    """
    values = "_".join(str(getattr(options, field.name)) for field in fields(options))
    module = ModuleType(f"{__name__}.with_{values}", "Kernel hooks with the options that the name lists.")
    ours = KernelHooks(options)
    for name in HOOKS:
        setattr(module, name, getattr(ours, name))
    sys.modules[module.__name__] = module
    return module


# -- hooks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelHooks:
    """Hook functions that Megatron calls, implemented with the operators of ``mindspeed_dsa.ops``.

    Attributes:
        options: options that define which parts run on our operators.
    """

    options: Options

    def run_fused_qk_topk(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        index_topk: int,
        starts: Tensor,
        ends: Tensor,
        block_size: int,
        use_relu: bool = True,
        **layout: Any,
    ) -> tuple[Tensor, None] | None:
        """Select the keys of every query token.

        Args:
            q: query of the indexer ``[sq, b, index_heads, index_dim]``.
            k: key of the indexer ``[sk, b, index_dim]``.
            weights: head weights ``[sq, b, index_heads]``, with all scales multiplied in.
            index_topk: number of keys per query token.
            starts: first visible key of each row, ``[sq]`` int32.
            ends: end of the visible keys of each row, ``[sq]`` int32.
            block_size: rows per launch; unused, because our operators limit their memory themselves.
            use_relu: whether ReLU is applied to the query-key products of each head.
            **layout: arguments from which Megatron derived ``starts`` and ``ends``; unused.

        Returns:
            Indices ``[b, sq, min(index_topk, sk)]`` int32, ascending with -1 at the tail, and None in place
            of the numbers of valid entries. Returns None instead of the tuple if the fused indexer is off.
        """
        if not self.options.indexer:
            return None
        index = IndexInputs.from_megatron(q, k, weights, use_relu)
        selection = select_keys(
            index,
            index_topk,
            Rows(starts, ends),
            self.options.backend,
            in_order=True,
            precision=self.options.precision,
            with_scores=False,
        )
        return selection.topk_indices, None

    def run_fused_qk_topk_with_loss(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        index_topk: int,
        starts: Tensor,
        ends: Tensor,
        block_size: int,
        query: Tensor,
        key: Tensor,
        softmax_scale: float,
        loss_coeff: float,
        pg_collection: Any,
        query_valid_rows: Tensor | None = None,
        calculate_per_token_loss: bool = False,
        use_relu: bool = True,
        **layout: Any,
    ) -> tuple[Tensor, None, Tensor] | None:
        """Select the keys of every query token, and compute the sparse indexer loss on them.

        Args:
            q: query of the indexer ``[sq, b, index_heads, index_dim]``.
            k: key of the indexer ``[sk, b, index_dim]``.
            weights: head weights ``[sq, b, index_heads]``, with all scales multiplied in.
            index_topk: number of keys per query token.
            starts: first visible key of each row, ``[sq]`` int32.
            ends: end of the visible keys of each row, ``[sq]`` int32.
            block_size: rows per launch; unused.
            query: query of the main attention ``[sq, b, heads, latent + rope]``, this rank's heads in
                absorbed form.
            key: key of the main attention ``[sk, b, 1, latent + rope]``.
            softmax_scale: factor of the main attention's scores.
            loss_coeff: coefficient of the loss.
            pg_collection: Megatron's process groups, with the tensor parallel group ``tp`` and the context
                parallel group ``cp``.
            query_valid_rows: mask of rows that count in the loss, ``[b, sq]``; None: all rows count.
            calculate_per_token_loss: whether the loss is a sum over rows instead of a mean.
            use_relu: whether ReLU is applied to the indexer's query-key products of each head.
            **layout: arguments from which Megatron derived ``starts`` and ``ends``; unused.

        Returns:
            Indices as in :meth:`run_fused_qk_topk`, None, and the scalar loss scaled by :func:`_for_average`.
            Returns None instead of the tuple if a part is off or keys are per head.
        """
        if not (self.options.indexer and self.options.kl_loss) or key.shape[2] != 1:
            return None
        backend, groups = self.options.backend, Groups.of(pg_collection)
        rows = self._rows(Rows(starts, ends, _counted(query_valid_rows)), query, groups)
        index = IndexInputs.from_megatron(q, k, weights, use_relu)
        precision = self.options.precision
        selection = select_keys(index, index_topk, rows, backend, in_order=True, precision=precision)
        wanted = LossOptions(loss_coeff, on_chosen_keys=True, per_token=calculate_per_token_loss)
        operands = Operands(query, key, _NO_VALUE, softmax_scale)
        loss = sparse_loss(Problem(operands, index_topk, rows, groups, wanted, backend), selection)
        return selection.topk_indices, None, _for_average(loss, wanted, groups)

    def run_fused_absorbed_sparse_attention(
        self,
        query: Tensor,
        key: Tensor,
        topk_indices: Tensor,
        softmax_scale: float,
        v_channels: int,
        topk_length: Tensor | None = None,
    ) -> Tensor | None:
        """Compute attention to the selected keys in absorbed form.

        Args:
            query: absorbed query ``[sq, b, heads, latent + rope]``.
            key: absorbed key ``[sk, b, 1, latent + rope]``.
            topk_indices: selected keys ``[b, sq, topk]``, any integer type, -1 for no key.
            softmax_scale: factor of the scores.
            v_channels: number of leading dimensions of the key that are the value.
            topk_length: number of valid leading entries per row, ``[b, sq]``; None: all are valid.

        Returns:
            Attention output ``[sq, b, heads, v_channels]``, or None if the fused attention is off.
        """
        if not self.options.attention:
            return None
        if topk_length is not None:
            # [topk] against [b, sq, 1]
            slot = torch.arange(topk_indices.shape[-1], device=topk_indices.device)
            topk_indices = topk_indices.masked_fill(slot >= topk_length[..., None], -1)
        if topk_indices.dtype != torch.int32:
            topk_indices = topk_indices.long()  # the operator checks the full range before it casts to int32
        attended = sparse_flash_attention(
            query.transpose(0, 1),  # [b, sq, heads, latent + rope]
            key.squeeze(2).transpose(0, 1),  # [b, sk, latent + rope]
            topk_indices,
            softmax_scale,
            value_dim=v_channels,
            backend=self.options.backend,
        )
        return attended.out.transpose(0, 1)  # [sq, b, heads, v_channels]

    def run_fused_dsa_attention(
        self,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        up_v_weight: Tensor | None,
        q_indexer: Tensor,
        k_indexer: Tensor,
        indexer_weights: Tensor,
        indexer_topk: int,
        softmax_scale: float,
        loss_coeff: float,
        sparse_loss: bool,
        calculate_per_token_loss: bool,
        absorbed_mla: bool,
        attn_mask_type: Any,
        varlen_starts: Tensor | None,
        varlen_ends: Tensor | None,
        key_positions: Tensor | None,
        query_valid_rows: Tensor | None,
        use_relu: bool,
        varlen_is_plain_causal: bool = False,
        pg_collection: Any = None,
        **layout: Any,
    ) -> tuple[Tensor, Tensor] | None:
        """Run selection, attention and indexer loss of a layer in one call.

        The loss reuses probabilities from the attention. The dense loss needs no ``[sq, sk]`` buffer.

        Args:
            query: absorbed query ``[sq, b, heads, latent + rope]``.
            key: absorbed key ``[sk, b, 1, latent + rope]``.
            value: None, because the value is a part of the key in absorbed form.
            up_v_weight: up-projection weight of the value, ``[heads, value_dim, latent]``.
            q_indexer: query of the indexer ``[sq, b, index_heads, index_dim]``.
            k_indexer: key of the indexer ``[sk, b, index_dim]``.
            indexer_weights: head weights ``[sq, b, index_heads]``, with all scales multiplied in.
            indexer_topk: number of keys per query token.
            softmax_scale: factor of the main attention's scores.
            loss_coeff: coefficient of the indexer loss; 0 for no loss.
            sparse_loss: whether the loss is over the selected keys only, instead of all visible keys.
            calculate_per_token_loss: whether the loss is a sum over rows instead of a mean.
            absorbed_mla: whether query and key are in absorbed form.
            attn_mask_type: Megatron's attention mask type.
            varlen_starts: first visible key of each row, ``[sq]``; None: a plain causal mask.
            varlen_ends: end of the visible keys of each row, ``[sq]``.
            key_positions: positions of the keys if they are not in sequence order; None if they are.
            query_valid_rows: mask of rows that count in the loss, ``[b, sq]``; None: all count.
            use_relu: whether ReLU is applied to the indexer's query-key products of each head.
            varlen_is_plain_causal: whether the ranges equal a plain causal mask.
            pg_collection: Megatron's process groups.
            **layout: arguments from which Megatron derived the ranges; unused.

        Returns:
            Output ``[sq, b, heads * value_dim]``, and the loss as in :meth:`run_fused_qk_topk_with_loss`.
            Returns None instead of the tuple if a part is off, keys are per head, or the ranges do not
            describe the mask.
        """
        with_loss = loss_coeff > 0 and torch.is_grad_enabled()
        options = self.options
        all_ours = options.indexer and options.attention and (options.kl_loss or not with_loss)
        has_ranges = varlen_starts is not None and varlen_ends is not None
        # Plain causal rows need no ranges: the operators then know their form without reading the device.
        plain = query.shape[0] == key.shape[0] and (varlen_is_plain_causal or not has_ranges)
        if (
            not all_ours
            or not absorbed_mla
            or value is not None
            or up_v_weight is None
            or getattr(attn_mask_type, "name", "") != "causal"
            or key_positions is not None
            or not (plain or has_ranges)
        ):
            return None
        groups, counted = Groups.of(pg_collection), _counted(query_valid_rows)
        rows = Rows(counted=counted) if plain else Rows(varlen_starts, varlen_ends, counted)
        loss = LossOptions(loss_coeff, sparse_loss, calculate_per_token_loss) if with_loss else None
        problem = Problem(
            Operands(query, key, up_v_weight, softmax_scale),
            indexer_topk,
            self._rows(rows, query, groups),
            groups,
            loss,
            options.backend,
            precision=options.precision,
        )
        index = IndexInputs.from_megatron(q_indexer, k_indexer, indexer_weights, use_relu)
        result = sparse_attention(problem, index)
        if loss is None or result.loss is None:
            return result.out, result.out.new_zeros((), dtype=torch.float32)
        return result.out, _for_average(result.loss, loss, groups)

    def _rows(self, rows: Rows, query: Tensor, groups: Groups) -> Rows:
        """Exclude padding from the loss. Our padding feature appended it, so Megatron has no mask for it."""
        if rows.counted is not None:
            return rows
        rank = 0 if groups.context is None else groups.context.rank()
        return rows.without(self.options.padding, rank, (query.shape[0], query.shape[1]), query.device)


def _for_average(loss: Tensor, wanted: LossOptions, groups: Groups) -> Tensor:
    """Multiply a rank's share of a mean loss by the number of ranks over which Megatron averages it."""
    # Megatron multiplies the loss's gradient by the number of ranks, and averages the logged value over
    # ranks. So the value is the share times the number of ranks, and the gradient is the share's own.
    # Per-token sums and losses of a single rank are returned unchanged.
    if wanted.per_token or groups.context is None:
        return loss
    return _TimesRanks.apply(loss, groups.context_ranks)  # type: ignore[no-any-return]


class _TimesRanks(torch.autograd.Function):
    """Multiply the loss by the number of ranks in forward, but leave the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, ranks: int) -> Tensor:
        return loss * ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _counted(query_valid_rows: Tensor | None) -> Tensor | None:
    return None if query_valid_rows is None else query_valid_rows.bool()
