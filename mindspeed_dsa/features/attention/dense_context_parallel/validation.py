"""Checks of dense attention by the operator, on context parallel ranks and on one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.context_parallel.algorithms import COMM_TYPES, registered
from mindspeed_dsa.features.attention.dense_context_parallel.options import DEFAULT, Options, wanted
from mindspeed_dsa.megatron.configuration import argument


def check_dense_attention(args: Any, options: Options) -> Iterator[str]:
    """Report invalid combinations; absent arguments are not checked."""
    if options.ranks == 1 or argument(args, "experimental_attention_variant") == "dsa":
        return
    names = options.all_of(DEFAULT)
    own = sorted(name for name in names if registered(name))
    if argument(args, "transformer_impl") == "transformer_engine" and find_spec("transformer_engine"):
        if own:
            yield (
                f"--context-parallel-algo {own[0]} is a strategy for Megatron's own attention, and "
                "Transformer Engine has its own; add --transformer-impl local"
            )
        return
    if "allgather" in names:
        yield (
            "kvallgather_cp_algo gathers the keys of sparse attention, and this model has dense attention; "
            "use megatron_cp_algo, ulysses_cp_algo or hybrid_cp_algo"
        )
    yield from _check_heads(args, options, names)
    yield from _check_attention(args)


def _check_heads(args: Any, options: Options, names: set[str]) -> Iterator[str]:
    heads = argument(args, "num_attention_heads")
    if heads is None:
        return
    tensor_ranks = argument(args, "tensor_model_parallel_size") or 1
    kv_heads = heads
    if argument(args, "group_query_attention") and not argument(args, "multi_latent_attention"):
        kv_heads = argument(args, "num_query_groups") or heads
    for name in sorted(names):
        degree = options.degree(name)
        if can_share(heads, kv_heads, degree, tensor_ranks):
            continue
        fitting = [
            size
            for size in range(2, options.ranks)
            if options.ranks % size == 0 and can_share(heads, kv_heads, size, tensor_ranks)
        ]
        nearest = "megatron_cp_algo"
        if fitting:
            nearest = f"hybrid_cp_algo with --ulysses-degree-in-cp {max(fitting)}"
        of_mindspeed = {theirs: ours for ours, theirs in COMM_TYPES.items()}
        yield (
            f"{of_mindspeed[name]} deals {heads} heads and {kv_heads} key-value heads to {degree} ranks of "
            f"each of {tensor_ranks} tensor parallel ranks, which does not come out even; use {nearest}"
        )


def can_share(heads: int, kv_heads: int, degree: int, tensor_ranks: int) -> bool:
    """Whether ranks that exchange heads get equally many; fewer key-value heads than ranks are repeated."""
    if heads % (degree * tensor_ranks) or kv_heads % tensor_ranks:
        return False
    own = kv_heads // tensor_ranks
    return own % degree == 0 or degree % own == 0


def _check_attention(args: Any) -> Iterator[str]:
    ours = "attention on context parallel ranks without Transformer Engine"
    if argument(args, "attention_dropout"):
        yield f"--attention-dropout: {ours} drops nothing; use --attention-dropout 0"
    if argument(args, "reset_attention_mask"):
        yield f"--reset-attention-mask: {ours} is causal over the whole sequence; omit it"
    if argument(args, "window_size"):
        yield f"--window-size: {ours} sees every earlier key; omit it"
    if argument(args, "softmax_type") not in (None, "vanilla"):
        yield f"--softmax-type: {ours} has the vanilla softmax; omit it"
    if argument(args, "sft") or argument(args, "hybrid_context_parallel"):
        yield (
            f"--sft and --hybrid-context-parallel cut documents with Transformer Engine, and this is {ours}; "
            "omit them, or use --pack-documents"
        )


def without_mask(args: Any) -> Sequence[str]:
    """Leave out the mask of the whole batch, which says no more than that attention is causal."""
    makes_mask = argument(args, "create_attention_mask_in_dataloader")
    if not makes_mask or argument(args, "reset_attention_mask"):
        return ()
    args.create_attention_mask_in_dataloader = False
    return ("--no-create-attention-mask-in-dataloader is added: attention is causal without a mask",)


_OURS = "--use-flash-attn without Transformer Engine"


def flash_wanted(settings: Any) -> bool:
    """Whether the flag is on, and no other feature attends for it.

    Context parallel ranks and latent attention without Transformer Engine attend by the same operator in any
    case (``dense-context-parallel``), and sparse attention has operators of its own.
    """
    return bool(
        getattr(settings, "use_flash_attn", False)
        and getattr(settings, "transformer_impl", None) == "local"
        and getattr(settings, "experimental_attention_variant", None) != "dsa"
        and not wanted(settings)
    )


def check_flash_attention(args: Any) -> Sequence[str]:
    """Report invalid combinations; absent arguments are not checked."""
    problems = []
    if argument(args, "attention_dropout"):
        problems.append(
            f"--attention-dropout: {_OURS} drops nothing; use --attention-dropout 0, or omit the flag"
        )
    if argument(args, "reset_attention_mask"):
        problems.append(
            f"--reset-attention-mask: {_OURS} is causal over the whole sequence; omit it for "
            "--pack-documents, or omit the flag"
        )
    return problems
