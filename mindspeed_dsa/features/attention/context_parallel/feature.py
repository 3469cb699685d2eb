"""Context parallelism for dense attention and MLA. On one rank: our attention operator for local layers.

Accepts MindSpeed's flags (``--context-parallel-algo``) and Megatron's (``--cp-comm-type``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.context_parallel.algorithms import (
    ALGORITHM,
    COMM_TYPES,
    MEGATRON_FLAGS,
    ULYSSES_DEGREE,
    Algorithms,
    check_context_parallel,
    registered,
)
from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag
from mindspeed_dsa.megatron import without_engine
from mindspeed_dsa.megatron.batches import MASKING
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.dsa import MLA, megatron_flag, uses_dsa
from mindspeed_dsa.megatron.graphs import ATTENTION, refuse_graphs
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.attention.context_parallel"
_CORE = "megatron.core.transformer.dot_product_attention:DotProductAttention"
DEFAULT = "p2p"
"""Megatron's default algorithm."""
_OURS = "attention on context parallel ranks without Transformer Engine"
NO_DEAL = (
    "under context parallelism Megatron rotates the rows of grouped heads where Transformer Engine cuts "
    "documents, and --pack-documents deals them out by work; omit --pack-documents, or use latent attention"
)
"""Message: attention other than MLA does not support the work-balanced layout of packs."""


@dataclass(frozen=True)
class Options(Algorithms):
    """Context parallel algorithms of a job, per layer."""


# -- names of algorithms -----------------------------------------------------------------------


def is_named(settings: Any) -> bool:
    """Return whether a context parallelism flag is set."""
    return Options.of(settings) != Options()


def name_for_megatron(args: Any) -> Sequence[str]:
    """Translate ``--context-parallel-algo`` to Megatron's own arguments; a ``Feature.rewrite``."""
    algorithms = Options.of(args)
    said = getattr(args, ALGORITHM.dest, None)
    if said is None or algorithms.ranks == 1 or algorithms.names[0] not in COMM_TYPES.values():
        return ()
    changes = []
    names = list(algorithms.names)
    if getattr(args, "cp_comm_type", None) != names:
        args.cp_comm_type = names
        changes.append(f"--context-parallel-algo {said} becomes --cp-comm-type {names[0]}")
    degree = algorithms.ulysses_degree
    if names == ["a2a+p2p"] and degree and algorithms.ranks % degree == 0:
        sizes = [degree, algorithms.ranks // degree]
        if getattr(args, "hierarchical_context_parallel_sizes", None) != sizes:
            args.hierarchical_context_parallel_sizes = sizes
            changes.append(
                f"--ulysses-degree-in-cp {degree} becomes --hierarchical-context-parallel-sizes "
                f"{sizes[0]} {sizes[1]}"
            )
    return tuple(changes)


NAMES = Feature(
    name="context-parallel",
    summary="Takes MindSpeed's names of context parallel algorithms beside Megatron's, for all layers or one "
    "per layer.",
    flags=(ALGORITHM, ULYSSES_DEGREE, *MEGATRON_FLAGS),
    active=is_named,
    options=Options.of,
    rewrite=name_for_megatron,
    check=check_context_parallel,
    doc="context-parallel.md",
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            "wrap",
            f"{_IMPL}.core_attention:count_layers_from_one",
            "Megatron reads a list of --cp-comm-type one layer too late, and past its end in the last layer",
            params=("config", "layer_number"),
            versions=">=0.12.1,<0.17",
        ),
    ),
)


# -- attention on context parallel ranks -------------------------------------------------------


def wanted(settings: Any) -> bool:
    """Return whether a model without DSA uses context parallelism, or MLA with Megatron's local modules."""
    if uses_dsa(settings):
        return False
    latent = getattr(settings, "multi_latent_attention", False)
    local = getattr(settings, "transformer_impl", None) == "local"
    return Options.of(settings).ranks > 1 or bool(latent and local)


def check_dense_attention(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem per argument that our dense attention does not support; skip those ``args`` lacks."""
    if argument(args, "experimental_attention_variant") == "dsa":
        return
    if options.ranks == 1:
        if argument(args, "multi_latent_attention") and argument(args, "transformer_impl") == "local":
            yield from _check_attention(args, "latent attention without Transformer Engine")
        return
    names = options.all_of(DEFAULT)
    strategies = sorted(name for name in names if registered(name))
    if argument(args, "transformer_impl") == "transformer_engine" and find_spec("transformer_engine"):
        if strategies:
            yield (
                f"--context-parallel-algo {strategies[0]} is a strategy for Megatron's own attention, and "
                "Transformer Engine has its own; add --transformer-impl local"
            )
        return
    if "allgather" in names:
        yield (
            "kvallgather_cp_algo gathers the keys of sparse attention, and this model has dense attention; "
            "use megatron_cp_algo, ulysses_cp_algo or hybrid_cp_algo"
        )
    yield from refuse_graphs(
        args,
        "--context-parallel-size with Megatron's own attention",
        "keys and values travel between pieces of attention, and the host waits for them",
        {ATTENTION},
    )
    yield from _check_heads(args, options, names)
    yield from _check_attention(args, _OURS)
    if argument(args, "sft") or argument(args, "hybrid_context_parallel"):
        yield (
            "--sft and --hybrid-context-parallel cut documents with Transformer Engine, and this is "
            f"{_OURS}; omit them, or use --pack-documents"
        )
    if argument(args, MASKING):
        yield (
            "--dataloader-inter-document-masking: Megatron deals out whole sequences with it, and "
            f"{_OURS} expects two chunks of each document; use --pack-documents in place of it"
        )


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
    """Return whether ``degree`` ranks can get equal numbers of query heads and of key-value heads.

    Key-value heads may be repeated until each rank has one.
    """
    if heads % (degree * tensor_ranks) or (kv_heads % tensor_ranks and tensor_ranks % kv_heads):
        return False
    # From 0.16 on, Megatron repeats key-value heads for tensor parallel ranks; older releases refuse them.
    local_kv_heads = max(kv_heads // tensor_ranks, 1)
    # e.g. 2 key-value heads: 4 ranks get one copy each, 3 ranks cannot share them
    return local_kv_heads % degree == 0 or degree % local_kv_heads == 0


def _check_attention(args: Any, ours: str) -> Iterator[str]:
    if argument(args, "attention_dropout"):
        yield f"--attention-dropout: {ours} drops nothing; use --attention-dropout 0"
    if argument(args, "reset_attention_mask"):
        yield f"--reset-attention-mask: {ours} is causal over the whole sequence; omit it"
    if argument(args, "window_size"):
        yield f"--window-size: {ours} sees every earlier key; omit it"
    if argument(args, "softmax_type") not in (None, "vanilla"):
        yield f"--softmax-type: {ours} has the vanilla softmax; omit it"


def without_mask(args: Any) -> Sequence[str]:
    """Disable the dataloader's attention mask, which our causal attention ignores; a ``Feature.rewrite``."""
    makes_mask = argument(args, "create_attention_mask_in_dataloader")
    # With reset_attention_mask the mask is not plain causal; the check reports it.
    if not makes_mask or argument(args, "reset_attention_mask"):
        return ()
    args.create_attention_mask_in_dataloader = False
    return ("--no-create-attention-mask-in-dataloader is added: attention is causal without a mask",)


_FLAGS = (
    ALGORITHM,
    ULYSSES_DEGREE,
    *MEGATRON_FLAGS,
    EXPERIMENTAL_ATTENTION_VARIANT,
    Flag("--multi-latent-attention", "Megatron's own flag.", megatron=True),
    megatron_flag("--transformer-impl"),
)

DENSE = Feature(
    name="dense-context-parallel",
    summary="Ring, exchanged heads, or both for dense and latent attention, without Transformer Engine.",
    flags=_FLAGS,
    active=wanted,
    when="latent attention on Megatron's own modules (--multi-latent-attention, --transformer-impl local), "
    "and for --context-parallel-size above 1, both without --experimental-attention-variant dsa",
    options=Options.of,
    rewrite=without_mask,
    check=check_dense_attention,
    doc="dense-context-parallel.md",
    patches=(
        Patch(
            f"{_CORE}.__init__",
            "wrap",
            f"{_IMPL}.core_attention:build_for_context_parallel",
            "Megatron's own attention refuses context parallelism, and to be built for latent attention",
            params=("config", "layer_number", "attn_mask_type", "attention_type"),
        ),
        Patch(
            f"{_CORE}.forward",
            "wrap",
            f"{_IMPL}.core_attention:attend_with_other_ranks",
            "Megatron's own attention sees its own rank's rows only",
            params=("query", "key", "value", "attention_mask", "attn_mask_type", "packed_seq_params"),
        ),
        Patch(
            f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.core_attention:project_latents",
            "latents are a hundredth of the keys and values of all heads, which Megatron would make and send",
            params=("hidden_states", "packed_seq_params"),
            versions=">=0.16",
        ),
        Patch(
            f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.core_attention:project_latents_in_three",
            "latents are a hundredth of the keys and values of all heads, which Megatron would make and send",
            params=("hidden_states", "packed_seq_params"),
            versions="<0.16",
        ),
        without_engine.MLA_ENGINE,
        replace(without_engine.NORMS, versions=">=0.12.1,<0.21"),
    ),
)


# -- attention on one rank: --use-flash-attn ---------------------------------------------------


def flash_wanted(settings: Any) -> bool:
    """Return whether ``--use-flash-attn`` is on and no other feature runs the attention.

    The feature ``dense-context-parallel`` (context parallelism, MLA without Transformer Engine) already uses
    this operator, and sparse attention has an operator of its own.
    """
    return bool(
        getattr(settings, "use_flash_attn", False)
        and getattr(settings, "transformer_impl", None) == "local"
        and getattr(settings, "experimental_attention_variant", None) != "dsa"
        and not wanted(settings)
    )


def check_flash_attention(args: Any, options: Any) -> Iterator[str]:
    """Yield a problem per argument that ``--use-flash-attn`` does not support; skip those ``args`` lacks."""
    ours = "--use-flash-attn without Transformer Engine"
    if argument(args, "attention_dropout"):
        yield f"--attention-dropout: {ours} drops nothing; use --attention-dropout 0, or omit the flag"
    if argument(args, "reset_attention_mask"):
        yield (
            f"--reset-attention-mask: {ours} is causal over the whole sequence; omit it for "
            "--pack-documents, or omit the flag"
        )


FLASH = Feature(
    name="flash-attention",
    summary="Dense attention by one operator, which holds no scores, without Transformer Engine.",
    flags=(
        Flag(
            "--use-flash-attn",
            "Megatron's own flag, which acts on none of its own modules.",
            megatron=True,
        ),
        *_FLAGS,
    ),
    active=flash_wanted,
    rewrite=without_mask,
    check=check_flash_attention,
    doc="flash-attention.md",
    patches=(
        Patch(
            f"{_CORE}.__init__",
            "wrap",
            f"{_IMPL}.core_attention:build_for_the_operator",
            "Megatron's own attention holds the scores of all pairs",
            params=("config", "layer_number", "attn_mask_type", "attention_type"),
        ),
        Patch(
            f"{_CORE}.forward",
            "wrap",
            f"{_IMPL}.core_attention:attend_with_other_ranks",
            "Megatron's own attention holds the scores of all pairs",
            params=("query", "key", "value", "attention_mask", "attn_mask_type", "packed_seq_params"),
        ),
    ),
)
