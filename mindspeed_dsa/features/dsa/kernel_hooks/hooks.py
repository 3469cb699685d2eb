"""Our kernel backend of DSA for Megatron-core 0.19: when it is selected, and its functions.

Megatron calls these with its layout, sequence first, and treats ``None`` as "declined": it then calls the
next function, and finally runs its own PyTorch code. ``starts`` and ``ends`` (the keys that each row sees, in
the order of ``k``) cover causal, packed and context parallel rows alike, so Megatron's other arguments about
packing are ignored.

Imports nothing of Megatron: fetched while Megatron is being imported.
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
from mindspeed_dsa.features.dsa.problem import Groups, IndexInputs, LossOptions, Operands, Problem, Rows
from mindspeed_dsa.features.dsa.sparse_attention import select_keys, sparse_attention
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention

NAME = "mindspeed"
"""Name of our kernel backend."""
# The field's type is a real one: Megatron-LM reads a flag's choices from it.
_CHOICES = Literal["none", "tilelang", "cudnn", "mindspeed"]
FIELD = fields(make_dataclass("_Choice", [("dsa_kernel_backend", _CHOICES, field(default="none"))]))[0]
"""The configuration's field with one more choice."""
HOOKS = (
    "run_fused_qk_topk",
    "run_fused_qk_topk_with_loss",
    "run_fused_absorbed_sparse_attention",
    "run_fused_dsa_attention",
)
_NO_VALUE = torch.empty(0, 0, 0)
"""Value for a loss without attention; its three dimensions mark the operands as absorbed."""


# -- selection of the backend ------------------------------------------------------------------


def accept_our_backend(original: Callable[[str], None]) -> Callable[[str], None]:
    """Decorate ``_validate_dsa_kernel_backend_dependencies``, which requires CUDA."""

    def _validate_dsa_kernel_backend_dependencies(dsa_kernel_backend: str) -> None:
        if dsa_kernel_backend != NAME:
            original(dsa_kernel_backend)

    return _validate_dsa_kernel_backend_dependencies


def choose_our_backend(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__``: a DSA model gets our backend unless it names another."""

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
    """Return the entry in Megatron's table of kernel backends, which it imports as a module."""
    return backend_module(context.options).__name__


@cache
def backend_module(options: Options) -> ModuleType:
    """Create a module whose functions are the hooks with these options.

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
    """Functions that Megatron calls, on the operators of ``mindspeed_dsa.ops``.

    Attributes:
        options: which parts our operators take over.
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
        """Select the keys of every row.

        Args:
            q: ``[sq, b, index_heads, index_dim]``.
            k: ``[sk, b, index_dim]``.
            weights: ``[sq, b, index_heads]``, every scale included.
            index_topk: keys per row.
            starts: ``[sq]`` int32, first visible key of each row.
            ends: ``[sq]`` int32, one past the last visible key.
            block_size: rows per launch; unused, our operators bound their memory themselves.
            use_relu: whether products are clamped at zero.
            **layout: the arguments from which Megatron derived ``starts`` and ``ends``.

        Returns:
            ``[b, sq, min(index_topk, sk)]`` int32, ascending, -1 at the tail, and None for the number of
            valid entries, which the -1 entries encode; or None if the fused indexer is switched off.
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
        """Select the keys of every row, and compute the sparse indexer loss on them.

        Args:
            q: ``[sq, b, index_heads, index_dim]``.
            k: ``[sk, b, index_dim]``.
            weights: ``[sq, b, index_heads]``, every scale included.
            index_topk: keys per row.
            starts: ``[sq]`` int32, first visible key of each row.
            ends: ``[sq]`` int32, one past the last visible key.
            block_size: rows per launch, not needed here.
            query: ``[sq, b, heads, latent + rope]``, this rank's heads in absorbed form.
            key: ``[sk, b, 1, latent + rope]``.
            softmax_scale: factor of the main attention's scores.
            loss_coeff: weight of the loss.
            pg_collection: Megatron's process groups; ``tp`` holds the ranks with the other heads, ``cp``
                those with the other rows.
            query_valid_rows: ``[b, sq]``, true for rows that count; all by default.
            calculate_per_token_loss: the sum over rows, not their mean.
            use_relu: whether the indexer's products are clamped at zero.
            **layout: the arguments from which Megatron derived ``starts`` and ``ends``.

        Returns:
            Indices as :meth:`run_fused_qk_topk` returns them, None, and the loss, a scalar, under context
            parallelism as :func:`_for_average` says; or None if a part is switched off or heads have separate
            keys.
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
        """Attend to the selected keys.

        Args:
            query: ``[sq, b, heads, latent + rope]``.
            key: ``[sk, b, 1, latent + rope]``.
            topk_indices: ``[b, sq, topk]`` of any integer type, -1 where there is no key.
            softmax_scale: factor of the scores.
            v_channels: leading part of the key that is the value.
            topk_length: ``[b, sq]``, how many leading entries of a row count; all by default.

        Returns:
            ``[sq, b, heads, v_channels]``; or None if the fused attention is switched off.
        """
        if not self.options.attention:
            return None
        if topk_length is not None:
            slot = torch.arange(topk_indices.shape[-1], device=topk_indices.device)
            topk_indices = topk_indices.masked_fill(slot >= topk_length[..., None], -1)
        if topk_indices.dtype != torch.int32:
            topk_indices = topk_indices.long()  # the operator looks at all bits before it narrows
        attended = sparse_flash_attention(
            query.transpose(0, 1),
            key.squeeze(2).transpose(0, 1),
            topk_indices,
            softmax_scale,
            value_dim=v_channels,
            backend=self.options.backend,
        )
        return attended.out.transpose(0, 1)

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
        """Run the whole layer: the loss gets its target from the attention, and the dense loss is streamed.

        Args:
            query: ``[sq, b, heads, latent + rope]``.
            key: ``[sk, b, 1, latent + rope]``.
            value: None in absorbed form.
            up_v_weight: the value's up-projection ``[heads, value_dim, latent]``.
            q_indexer: ``[sq, b, index_heads, index_dim]``.
            k_indexer: ``[sk, b, index_dim]``.
            indexer_weights: ``[sq, b, index_heads]``, every scale included.
            indexer_topk: keys per row.
            softmax_scale: factor of the main attention's scores.
            loss_coeff: weight of the indexer loss; 0 for none.
            sparse_loss: the loss over the selected keys, not over all visible ones.
            calculate_per_token_loss: the sum over rows, not their mean.
            absorbed_mla: whether query and key are in absorbed form.
            attn_mask_type: Megatron's.
            varlen_starts: ``[sq]``, first visible key of each row; plain causal rows without it.
            varlen_ends: ``[sq]``, one past the last visible key.
            key_positions: positions of the keys, if these are not in order.
            query_valid_rows: ``[b, sq]``, true for rows that count in the loss.
            use_relu: whether the indexer's products are clamped at zero.
            varlen_is_plain_causal: whether the ranges are those of plain causal rows.
            pg_collection: Megatron's process groups.
            **layout: the arguments from which Megatron derived the ranges.

        Returns:
            ``[sq, b, heads * value_dim]`` and the loss as :meth:`run_fused_qk_topk_with_loss` returns it; or
            None if a part is switched off, heads have separate keys, or ranges do not describe the mask.
        """
        with_loss = loss_coeff > 0 and torch.is_grad_enabled()
        chosen = self.options
        all_ours = chosen.indexer and chosen.attention and (chosen.kl_loss or not with_loss)
        has_ranges = varlen_starts is not None and varlen_ends is not None
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
            chosen.backend,
            precision=chosen.precision,
        )
        index = IndexInputs.from_megatron(q_indexer, k_indexer, indexer_weights, use_relu)
        result = sparse_attention(problem, index)
        if loss is None or result.loss is None:
            return result.out, result.out.new_zeros((), dtype=torch.float32)
        return result.out, _for_average(result.loss, loss, groups)

    def _rows(self, rows: Rows, query: Tensor, groups: Groups) -> Rows:
        """Leave out rows of padding, which Megatron does not know to be that."""
        if rows.counted is not None:
            return rows
        rank = 0 if groups.context is None else groups.context.rank()
        return rows.without(self.options.padding, rank, (query.shape[0], query.shape[1]), query.device)


def _for_average(loss: Tensor, wanted: LossOptions, groups: Groups) -> Tensor:
    """Scale a context parallel rank's share of the loss as Megatron expects it.

    Megatron multiplies the loss's gradient by the number of ranks and averages the logged value over them. So
    the value is the share times the number of ranks, and the gradient is that of the share. Per-token sums,
    and losses of one rank, are returned as they are.
    """
    if wanted.per_token or groups.context is None:
        return loss
    return _TimesRanks.apply(loss, groups.context_ranks)  # type: ignore[no-any-return]


class _TimesRanks(torch.autograd.Function):
    """Loss times the number of ranks; in backward the gradient is that of the loss itself."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, ranks: int) -> Tensor:
        return loss * ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _counted(query_valid_rows: Tensor | None) -> Tensor | None:
    return None if query_valid_rows is None else query_valid_rows.bool()
