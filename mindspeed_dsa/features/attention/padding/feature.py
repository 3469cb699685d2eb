"""Padding of sequences, so that context and tensor parallel ranks can split them evenly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.context_parallel.algorithms import BLOCK_ROWS, CONTEXT_PARALLEL_SIZE
from mindspeed_dsa.context_parallel.padding import Padding
from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron.batches import packs_of_megatron
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.dsa import Options as Fused
from mindspeed_dsa.megatron.dsa import megatron_flag, uses_dsa
from mindspeed_dsa.megatron.graphs import ATTENTION, REST, ROUTER, refuse_graphs
from mindspeed_dsa.patches.spec import Patch

if TYPE_CHECKING:
    from typing_extensions import Self


INSTEAD = "use a --seq-length that ranks divide"


@dataclass(frozen=True)
class Options:
    """Padding options of a job.

    Attributes:
        padding: sequence length before and after padding.
        fused: parts of DSA that run on our operators.
    """

    padding: Padding
    fused: Fused

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Build from resolved settings, or from arguments."""
        return cls(Padding.of(settings), Fused.of(settings))


def is_wanted(settings: Any) -> bool:
    """Return whether the sequence length is not divisible by the ranks."""
    return Padding.of(settings).rows > 0


def lengthen(args: Any) -> Sequence[str]:
    """Set the padded ``seq_length`` in the arguments; a ``Feature.rewrite``. Datasets keep the original."""
    padding = Padding.of(args)
    if not padding.rows:
        return ()
    args.seq_length = padding.length
    most = getattr(args, "max_position_embeddings", None)
    is_learned = getattr(args, "position_embedding_type", None) == "learned_absolute"
    if most is not None and most < padding.length and not is_learned:  # sizes no weight unless learned
        args.max_position_embeddings = padding.length
    share = 100 * padding.rows / padding.length
    change = (
        f"--seq-length {padding.tokens} is padded to {padding.length}, which the ranks divide: "
        f"{padding.rows} of {padding.length} rows ({share:.2g} %) are computed and count nothing"
    )
    return (change,)


def check_padding(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem per argument that would let padding change the loss; skip those ``args`` lacks.

    The arguments already have the padded length here, so ``options.padding`` has no padding left to add.
    """
    if argument(args, "moe_expert_capacity_factor") is not None:
        yield (
            "--moe-expert-capacity-factor: rows of padding would take places of an expert from tokens; omit "
            f"it, or {INSTEAD}"
        )
    ranks = argument(args, "context_parallel_size") or 1
    if ranks > 1 and argument(args, "mtp_num_layers") and argument(args, "calculate_per_token_loss"):
        yield (
            "--calculate-per-token-loss: Megatron weighs the losses of --mtp-num-layers by the tokens of "
            f"each context parallel rank, of which padding leaves some fewer; omit it, or {INSTEAD}"
        )
    if argument(args, "iterations_to_skip"):
        yield (
            "--iterations-to-skip: Megatron reads the batch of a skipped step outside of its schedule, where "
            f"it is not padded; omit it, or {INSTEAD}"
        )
    for flag in packs_of_megatron(args):
        yield f"{flag}: its batches describe their documents, and no padding; omit it, or {INSTEAD}"
    yield from refuse_graphs(
        args,
        "a --seq-length that ranks do not divide",
        "masks of padding are copied from the host",
        {ATTENTION, ROUTER, REST},
    )
    balancing = argument(args, "moe_router_load_balancing_type")
    for kind in ("sinkhorn", "quantile_balancing"):
        if balancing == kind or (isinstance(balancing, (list, tuple)) and kind in balancing):
            yield (
                f"--moe-router-load-balancing-type {kind} balances all rows together, padding too; use "
                f"aux_loss, or {INSTEAD}"
            )
    fused = options.fused
    learns = uses_dsa(args) and argument(args, "dsa_indexer_loss_coeff")
    if learns and not (fused.all_ours or fused.attends_densely):
        yield (
            "Megatron's own indexer loss counts rows of padding; add --use-fused-dsa and omit "
            f"--no-use-fused-..., or {INSTEAD}"
        )


_HERE = "mindspeed_dsa.features.attention.padding"
_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"

FEATURE = Feature(
    name="pad-sequences",
    summary="Pads sequences and packs that ranks do not divide, with rows that count nothing.",
    flags=(
        megatron_flag("--seq-length", int),
        CONTEXT_PARALLEL_SIZE,
        megatron_flag("--tensor-model-parallel-size", int),
        Flag("--sequence-parallel", "Megatron's own flag.", megatron=True),
        BLOCK_ROWS,
    ),
    active=is_wanted,
    when="a --seq-length that context parallel ranks, or tensor parallel ranks under --sequence-parallel, do "
    "not divide",
    requires=Requires(versions={"megatron-core": ">=0.16,<0.21"}),
    options=Options.of,
    rewrite=lengthen,
    check=check_padding,
    doc="pad-sequences.md",
    patches=(
        Patch(
            "megatron.core.datasets.blended_megatron_dataset_config:BlendedMegatronDatasetConfig.__post_init__",
            "wrap",
            f"{_HERE}.batches:keep_length_of_data",
            "data sets would read as many tokens as there are rows, padding included",
        ),
        Patch(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            "wrap",
            f"{_HERE}.batches:pad_batches",
            "batches have no rows of padding, and ranks would average over different numbers of tokens",
            priority=-100,  # wrappers that read batches ahead get batches without padding
        ),
        Patch(
            f"{_ROUTER}.routing",
            "wrap",
            f"{_HERE}.routers:leave_out_padding",
            "routers would count rows of padding in their losses and in the load of experts",
            params=("logits", "padding_mask"),
        ),
        Patch(
            f"{_ROUTER}._apply_expert_bias",
            "wrap",
            f"{_HERE}.routers:count_tokens",
            "Megatron's count of tokens leaves out rows by a mask of the wrong shape",
            params=("routing_map", "padding_mask"),
            versions="<0.20.dev0",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_utils:z_loss_func",
            "wrap",
            f"{_HERE}.routers:average_over_ranks",
            "the z-loss is averaged over each rank's own tokens, of which padding leaves different numbers",
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:roll_tensor",
            "wrap",
            f"{_HERE}.batches:roll_data",
            "multi-token prediction would read rows of padding, and average over each rank's own tokens",
            params=("tensor", "shifts", "dims", "cp_group"),
            priority=50,  # outside wrappers for other layouts of rows, inside wrappers for documents
        ),
    ),
)
