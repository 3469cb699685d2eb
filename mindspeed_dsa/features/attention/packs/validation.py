"""Combinations that documents cannot be packed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.features.attention.dense_context_parallel.options import NO_DEAL
from mindspeed_dsa.megatron.dsa import SHARED_KEYS, shares_keys
from mindspeed_dsa.megatron.dsa import Options as Fused
from mindspeed_dsa.patches import versions

_WITHOUT_PACKED_ROLL = SpecifierSet("<0.16", prereleases=True)
_REFUSED_BY_DSA = SpecifierSet(">=0.16,<0.19", prereleases=True)
_DELIVERS_SFT = SpecifierSet(">=0.17", prereleases=True)
_CUTS_DOCUMENTS = SpecifierSet(">=0.19", prereleases=True)
_SHARE_KEYS = SpecifierSet(SHARED_KEYS, prereleases=True)


def check_packs(args: Any) -> Sequence[str]:
    """Report them; absent arguments are not checked."""
    problems = []
    if (getattr(args, "micro_batch_size", None) or 1) != 1:
        problems.append(
            f"--pack-documents makes one row of tokens a microbatch, and --micro-batch-size is "
            f"{args.micro_batch_size}; use 1 and a --seq-length that is as many times longer"
        )
    release = versions.of_megatron(getattr(args, "megatron_root", "megatron")) or "0"
    if getattr(args, "mtp_num_layers", None) and release in _WITHOUT_PACKED_ROLL:
        problems.append(
            f"multi-token prediction of Megatron-core {release} looks into the next document of a pack; "
            "omit --mtp-num-layers or --pack-documents, or use Megatron-core 0.16 or later"
        )
    if getattr(args, "experimental_attention_variant", None) == "dsa" and release in _REFUSED_BY_DSA:
        fused = Fused.of(args)
        if not (fused.all_ours or fused.warmup):
            problems.append(
                f"Megatron-core {release} has no packed sequences for DSA in its own code; add "
                "--use-fused-dsa and omit --no-use-fused-..., or omit --pack-documents"
            )
    if (getattr(args, "context_parallel_size", None) or 1) > 1:
        problems += cut_by_megatron(release, args, Fused.of(args))
        if getattr(args, "experimental_attention_variant", "dsa") != "dsa":
            problems += _problems_of_dense_attention(args)
    if getattr(args, "sft", False) and release in _DELIVERS_SFT:
        problems.append(f"Megatron-LM {release} itself delivers the packs of --sft; omit --pack-documents")
    for name, flag in (
        ("dataloader_inter_document_masking", "--dataloader-inter-document-masking"),
        ("reset_attention_mask", "--reset-attention-mask"),
        ("hybrid_context_parallel", "--hybrid-context-parallel"),
    ):
        if getattr(args, name, False):
            problems.append(f"--pack-documents and {flag} both say which tokens see each other; omit one")
    return problems


def _problems_of_dense_attention(args: Any) -> Iterator[str]:
    """Rows that are dealt out are known to our own attention, and to latent attention's rotary embedding."""
    if not getattr(args, "multi_latent_attention", True):
        yield NO_DEAL
    if getattr(args, "transformer_impl", None) == "transformer_engine" and find_spec("transformer_engine"):
        yield (
            "under context parallelism Transformer Engine expects two chunks of each document on each rank, "
            "and --pack-documents deals out rows by work; omit it, or add --transformer-impl local"
        )


def cut_by_megatron(release: str, config: Any, fused: Fused) -> list[str]:
    """Whether Megatron's own attention runs in this model and expects the rows of packs on certain ranks.

    Args:
        release: of Megatron-core.
        config: of the model, or its arguments.
        fused: the parts of DSA that run on our operators.
    """
    if release not in _CUTS_DOCUMENTS or (release in _SHARE_KEYS and shares_keys(config, fused)):
        return []
    problem = (
        f"under context parallelism the attention of Megatron-core {release} itself expects two chunks of "
        "each document on each rank, and --pack-documents deals out rows by work; with DSA add "
        "--use-fused-dsa and omit --no-use-fused-... and --dsa-indexer-topk-freq, or omit --pack-documents "
        "and use --dataloader-inter-document-masking"
    )
    return [problem]
