"""Packed samples: several documents in one sequence, each attending only to itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.context_parallel.algorithms import BLOCK_ROWS, CONTEXT_PARALLEL_SIZE
from mindspeed_dsa.context_parallel.padding import Padding
from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.attention.context_parallel.feature import NO_DEAL
from mindspeed_dsa.megatron.batches import EVAL_MICRO, evaluates
from mindspeed_dsa.megatron.configuration import argument, cuts_weights_further, hybrid_flag
from mindspeed_dsa.megatron.dsa import KERNELS, megatron_flag, shares_keys, uses_dsa
from mindspeed_dsa.megatron.dsa import Options as Fused
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch

if TYPE_CHECKING:
    from typing_extensions import Self

_WANTED = {
    "reset_position_ids": True,
    "eod_mask_loss": True,
    # The bounds of documents are known: a [sequence, sequence] mask would be redundant.
    "create_attention_mask_in_dataloader": False,
}


def reset_at_documents(args: Any) -> Sequence[str]:
    """Set the arguments that reset positions and mask the loss at document ends; a ``Feature.rewrite``."""
    changes = []
    for name, value in _WANTED.items():
        if hasattr(args, name) and getattr(args, name) != value:
            setattr(args, name, value)
            changes.append(f"--pack-documents: {name} is {value}")
    return changes


_BLOCK_ROWS = 128


@dataclass(frozen=True)
class Options:
    """Options of packed documents under context parallelism.

    Attributes:
        block_rows: number of tokens in each block distributed to context parallel ranks.
        fused: parts of DSA that run on our operators.
        padding: padding of packs whose length the ranks do not divide.
    """

    block_rows: int
    fused: Fused
    padding: Padding

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Build from resolved settings."""
        block_rows = getattr(settings, "cp_block_rows", None) or _BLOCK_ROWS
        return cls(block_rows, Fused.of(settings), Padding.of(settings))


_WITHOUT_PACKED_ROLL = SpecifierSet("<0.16", prereleases=True)
_REFUSED_BY_DSA = SpecifierSet(">=0.16,<0.19", prereleases=True)
_DELIVERS_SFT = SpecifierSet(">=0.17", prereleases=True)
_CUTS_DOCUMENTS = SpecifierSet(">=0.19", prereleases=True)
_SHARE_KEYS = SpecifierSet(KERNELS, prereleases=True)


def check_packs(args: Any, options: Any) -> Sequence[str]:
    """Return a problem per argument that packed documents do not support; skip those ``args`` lacks."""
    problems = []
    if (getattr(args, "micro_batch_size", None) or 1) != 1:
        problems.append(
            f"--pack-documents makes one row of tokens a microbatch, and --micro-batch-size is "
            f"{args.micro_batch_size}; use 1 and a --seq-length that is as many times longer"
        )
    elif evaluates(args) and (getattr(args, "eval_micro_batch_size", None) or 1) != 1:
        problems.append(
            f"--pack-documents makes one row of tokens a microbatch, of evaluations too, and {EVAL_MICRO} is "
            f"{args.eval_micro_batch_size}; use 1, or omit it"
        )
    if flag := hybrid_flag(args):
        problems.append(
            f"--pack-documents delivers packs to GPT models alone, not to those of {flag}; omit one"
        )
    # Ranks that share a weight's shards read other data, and are in the group along which packs are sent.
    if cuts_weights_further(args):
        problems.append(
            "--pack-documents cannot be used with more --tensor-parallel-num-weight-shards than tensor "
            "parallel ranks, which read other documents; omit one of them"
        )
    if argument(args, "transformer_impl") == "local" and not uses_dsa(args):
        problems += _problems_of_plain_attention(args)
    release = versions.of_job(args) or "0"
    if getattr(args, "mtp_num_layers", None) and release in _WITHOUT_PACKED_ROLL:
        problems.append(
            f"multi-token prediction of Megatron-core {release} looks into the next document of a pack; "
            "omit --mtp-num-layers or --pack-documents, or use Megatron-core 0.16 or later"
        )
    if uses_dsa(args) and release in _REFUSED_BY_DSA:
        fused = Fused.of(args)
        if not (fused.all_ours or fused.attends_densely):
            problems.append(
                f"Megatron-core {release} has no packed sequences for DSA in its own code; add "
                "--use-fused-dsa and omit --no-use-fused-..., or omit --pack-documents"
            )
    if (getattr(args, "context_parallel_size", None) or 1) > 1:
        problems += cut_by_megatron(release, args, Fused.of(args))
        if getattr(args, "experimental_attention_variant", "dsa") != "dsa":
            problems += _problems_of_dense_attention(args)
    if getattr(args, "sft", False):
        problems.append(
            f"Megatron-LM {release} itself delivers the packs of --sft; omit --pack-documents"
            if release in _DELIVERS_SFT
            else f"--pack-documents resets positions in a pack, which the data sets of --sft refuse in "
            f"Megatron-LM {release}; use Megatron-LM 0.18 or later without --pack-documents"
        )
    for name, flag in (
        ("dataloader_inter_document_masking", "--dataloader-inter-document-masking"),
        ("reset_attention_mask", "--reset-attention-mask"),
        ("hybrid_context_parallel", "--hybrid-context-parallel"),
    ):
        if getattr(args, name, False):
            problems.append(f"--pack-documents and {flag} both say which tokens see each other; omit one")
    problems += refuse_graphs(
        args,
        "--pack-documents",
        "the documents of each pack, which the host lists, decide which keys and padding a graph reads",
    )
    return problems


def _problems_of_plain_attention(args: Any) -> Iterator[str]:
    """Report kinds of attention that Megatron's own modules have only for whole sequences."""
    softmax = argument(args, "softmax_type") or "vanilla"
    kinds = {"--window-size": bool(argument(args, "window_size")), "--softmax-type": softmax != "vanilla"}
    for flag, is_set in kinds.items():
        if is_set:
            yield (
                f"{flag}: without Transformer Engine, packed documents attend to all of their keys; omit one"
            )


def _problems_of_dense_attention(args: Any) -> Iterator[str]:
    """Report dense attention other than our MLA, which cannot use the work-balanced layout."""
    if not getattr(args, "multi_latent_attention", True):
        yield NO_DEAL
    if getattr(args, "transformer_impl", None) == "transformer_engine" and find_spec("transformer_engine"):
        yield (
            "under context parallelism Transformer Engine expects two chunks of each document on each rank, "
            "and --pack-documents deals out rows by work; omit it, or add --transformer-impl local"
        )


def cut_by_megatron(release: str, config: Any, fused: Fused) -> list[str]:
    """Report if the model runs Megatron's own attention, which does not support our layout of packs.

    Args:
        release: release of Megatron-core.
        config: configuration of the model, or the job's arguments.
        fused: parts of DSA that run on our operators.
    """
    if release not in _CUTS_DOCUMENTS or (release in _SHARE_KEYS and shares_keys(config, fused)):
        return []
    problem = (
        f"under context parallelism the attention of Megatron-core {release} itself expects two chunks of "
        "each document on each rank, and --pack-documents deals out rows by work; with DSA add "
        "--use-fused-dsa and omit --no-use-fused-..., or omit --pack-documents"
    )
    return [problem]


_IMPL = "mindspeed_dsa.features.attention.packs.delivery"
_ROUTERS = "mindspeed_dsa.features.attention.packs.routers"
_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_GPT = "megatron.core.models.gpt.gpt_model:GPTModel"

FEATURE = Feature(
    name="pack-documents",
    summary="Each sample is a pack of documents that do not see each other, on every pipeline stage.",
    flags=(
        Flag(
            "--pack-documents",
            "Documents of a sample attend to themselves only. They lie where the batch's cu_seqlens say, or "
            "where its end-of-document tokens are. Resets positions and masks the loss of these tokens.",
        ),
        BLOCK_ROWS,
        CONTEXT_PARALLEL_SIZE,
        megatron_flag("--micro-batch-size", int),
        megatron_flag(EVAL_MICRO, int),
        megatron_flag("--mtp-num-layers", int),
    ),
    options=Options.of,
    rewrite=reset_at_documents,
    check=check_packs,
    doc="pack-documents.md",
    patches=(
        Patch(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            "wrap",
            f"{_IMPL}:deliver_packs",
            "pipeline stages between the first and the last see no batch, and would attend across documents",
        ),
        Patch(
            f"{_GPT}.forward",
            "wrap",
            f"{_IMPL}:with_pack",
            "training scripts do not pass the lengths of documents on",
            params=("packed_seq_params",),
        ),
        Patch(
            f"{_GPT}.build_schedule_plan",
            "wrap",
            f"{_IMPL}:with_pack",
            "training scripts do not pass the lengths of documents on",
            params=("packed_seq_params",),
            versions=">=0.14",
            required=False,
        ),
        Patch(
            "megatron.core.utils:get_batch_on_this_cp_rank",
            "wrap",
            f"{_IMPL}:deal_rows",
            "Megatron cuts packs into chunks as it cuts whole sequences, which balances no work",
            params=("batch",),
            priority=100,
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:roll_tensor",
            "wrap",
            f"{_IMPL}:roll_in_documents",
            "multi-token prediction knows no padding between documents, and no rows that were dealt by work",
            params=("tensor", "shifts", "dims", "cp_group", "packed_seq_params"),
            versions=">=0.16",
            priority=100,  # outside wrappers that only support whole sequences
        ),
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_ROUTERS}:mask_padding",
            "routers would count rows of no document in their losses and in the load of experts",
            versions=">=0.16",
        ),
        Patch(
            f"{_ROUTER}.routing",
            "wrap",
            f"{_ROUTERS}:weigh_tokens",
            "the z-loss is averaged over each rank's own tokens, of which padding leaves different numbers",
            params=("logits", "padding_mask"),
            versions=">=0.16",
            priority=-100,  # inside wrappers that know the padding at the end of packs
        ),
        Patch(
            f"{_ROUTER}._apply_expert_bias",
            "wrap",
            "mindspeed_dsa.features.attention.padding.routers:count_tokens",
            "Megatron's count of tokens leaves out rows by a mask of the wrong shape",
            params=("routing_map", "padding_mask"),
            versions=">=0.16,<0.20.dev0",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_utils:z_loss_func",
            "wrap",
            "mindspeed_dsa.features.attention.padding.routers:average_over_ranks",
            "the z-loss is averaged over each rank's own tokens, of which padding leaves different numbers",
            versions=">=0.16",
        ),
        Patch(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
            "wrap",
            f"{_IMPL}:attend_to_own_document",
            "Megatron's own dense attention refuses packs",
            params=("query", "key", "value", "attention_mask", "attn_mask_type", "packed_seq_params"),
            priority=100,  # outside wrappers that only support whole sequences
        ),
    ),
)
