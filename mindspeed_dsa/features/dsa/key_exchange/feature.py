"""DSA under context parallelism: all-gathered keys, and tokens assigned to ranks in blocks for balance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.context_parallel.algorithms import BLOCK_ROWS, MEGATRON_FLAGS, Algorithms
from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag
from mindspeed_dsa.megatron.batches import MASKING, packs_of_megatron
from mindspeed_dsa.megatron.configuration import argument, hybrid_flag
from mindspeed_dsa.megatron.dsa import DSA, MLA, shares_keys, uses_dsa
from mindspeed_dsa.megatron.dsa import Options as Fused
from mindspeed_dsa.megatron.graphs import ATTENTION, refuse_graphs
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self


def gather_keys(args: Any) -> Sequence[str]:
    """Set ``--cp-comm-type`` to allgather unless the job sets it; a ``Feature.rewrite``."""
    options = Options.of(args)
    if getattr(args, "cp_comm_type", None) == [GATHER] or options.names not in ((), ("p2p",), (GATHER,)):
        return ()
    args.cp_comm_type = [GATHER]
    return (f"DSA gathers keys over --context-parallel-size {options.ranks}: --cp-comm-type {GATHER}",)


GATHER = "allgather"


@dataclass(frozen=True)
class Options(Algorithms):
    """Context parallel algorithms of a job, per layer; DSA supports only allgather."""

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Build like :meth:`Algorithms.of`.

        Raises:
            SettingsError: settings are invalid, or name an algorithm other than allgather.
        """
        # Each query selects among the index keys of the whole sequence, so every rank has to gather them.
        options = super().of(settings)
        # Job arguments may have Megatron's default here, which gather_keys changes later.
        if isinstance(settings, Settings) and options.all_of(GATHER) != {GATHER}:
            raise SettingsError(
                f"mindspeed_dsa: DSA's attention gathers keys, and {', '.join(options.names)} was named; use "
                "--context-parallel-algo kvallgather_cp_algo or --cp-comm-type allgather"
            )
        return options


def wanted(settings: Any) -> bool:
    """Return whether a DSA model runs with context parallelism."""
    is_dsa = uses_dsa(settings)
    return is_dsa and (getattr(settings, "context_parallel_size", None) or 1) > 1


_OWN_CODE = SpecifierSet("<0.19", prereleases=True)
_WHOLE_ROLL = SpecifierSet("<0.14", prereleases=True)


def check_dsa_context_parallel(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem per argument that DSA does not support under context parallelism.

    Arguments that ``args`` lacks are skipped.
    """
    if options.ranks == 1:
        return
    others = options.all_of(GATHER) - {GATHER}
    if others:
        yield (
            f"DSA's attention gathers keys, and {', '.join(sorted(others))} was named; use "
            "kvallgather_cp_algo"
        )
    yield from refuse_graphs(
        args, "--context-parallel-size with DSA", "the host waits for the gather of keys", {ATTENTION}
    )
    release = versions.of_job(args)
    if argument(args, MASKING):
        yield (
            "--dataloader-inter-document-masking: under context parallelism Megatron deals out whole "
            "sequences, and attends as if each document lay in two chunks on each rank; use "
            "--context-parallel-size 1, or --pack-documents in place of it"
        )
    if release is None or release not in _OWN_CODE:
        return
    fused = Fused.of(args)
    if release in SpecifierSet(">=0.16", prereleases=True) and not fused.all_ours:
        yield (
            f"Megatron-core {release} has no context parallelism for DSA in its own code; add "
            "--use-fused-dsa and omit --no-use-fused-..., or use --context-parallel-size 1"
        )
    if not fused.absorb:
        yield (
            "context parallel ranks share the latent key of DSA's absorbed form; add --use-dsa-absorb or use "
            "--context-parallel-size 1"
        )
    if release in _WHOLE_ROLL and argument(args, "mtp_num_layers"):
        yield (
            f"Megatron-core {release} shifts the labels of multi-token prediction within a rank's rows; use "
            "0.14 or later, or omit --mtp-num-layers"
        )


_IMPL = "mindspeed_dsa.features.dsa.key_exchange"
_RELEASES = ">=0.16,<0.19"

KEEP_GATHERED = Flag(
    "--cp-keep-gathered",
    "Keep the keys that were gathered from context parallel ranks until backward, instead of gathering them "
    "again there.",
)

KEYS = Feature(
    name="dsa-context-parallel",
    summary="DSA under context parallelism: queries stay, small keys are gathered behind the projections.",
    overlaps="the gather of keys",
    flags=(KEEP_GATHERED, *MEGATRON_FLAGS, EXPERIMENTAL_ATTENTION_VARIANT),
    active=wanted,
    options=Options.of,
    rewrite=gather_keys,
    check=check_dsa_context_parallel,
    doc="dsa-context-parallel.md",
    patches=(
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            "wrap",
            f"{_IMPL}.layers:accept_context_parallel_dsa",
            "Megatron's configuration asserts one context parallel rank for DSA",
            versions=_RELEASES,
        ),
        Patch(
            f"{DSA}:DSAIndexer.__init__",
            "wrap",
            f"{_IMPL}.layers:mark_gradients_of_own_rows",
            "key and weights are projected from a rank's own rows: their gradients are parts, to be summed",
            versions=_RELEASES,
            priority=100,  # after the wrapper that marks gradients as averages
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_IMPL}.layers:wait_before_recompute",
            "a gather of keys under way cannot be recomputed",
            params=("query", "key", "value", "attention_mask"),
            versions=_RELEASES,
            priority=200,  # outside the recomputation
        ),
        Patch(
            f"{MLA}:MultiLatentAttention.forward",
            "wrap",
            f"{_IMPL}.layers:gather_again_early",
            "the keys that backward reads are gathered behind the output projection's backward",
            versions=">=0.12.1,<0.19",
        ),
    ),
)


# -- rows in blocks: --cp-block-rows ------------------------------------------------------------


@dataclass(frozen=True)
class BlockOptions(Algorithms):
    """Layout of tokens over context parallel ranks, for ``--cp-block-rows``."""


def deals_blocks(settings: Any) -> bool:
    """Return whether tokens are assigned to context parallel ranks in blocks."""
    options = BlockOptions.of(settings)
    return options.ranks > 1 and options.block_rows > 0


def check_block_rows(args: Any, options: BlockOptions) -> Iterator[str]:
    """Yield a problem if an attention supports only Megatron's layout of tokens, not blocks."""
    if options.ranks == 1 or not options.block_rows:
        return
    if argument(args, "experimental_attention_variant") != "dsa":
        yield (
            "--cp-block-rows balances sparse attention, and the model has none; omit it or add "
            "--experimental-attention-variant dsa"
        )
    if flag := hybrid_flag(args):
        yield f"--cp-block-rows: layers of {flag} expect two chunks of tokens on each rank; omit one of them"
    for flag in packs_of_megatron(args):
        yield f"--cp-block-rows deals out whole sequences or packs of --pack-documents; omit it or {flag}"
    release = versions.of_job(args)
    own_rows = release is not None and release in SpecifierSet(">=0.19", prereleases=True)
    if own_rows and not shares_keys(args, Fused.of(args)):
        yield (
            f"--cp-block-rows: the attention of Megatron-core {release} knows its own rows only; add "
            "--use-fused-dsa with all its parts, in a stage that attends sparsely, or omit it"
        )


BLOCKS = Feature(
    name="cp-block-rows",
    summary="Deals rows to context parallel ranks in small blocks, which balances sparse attention.",
    flags=(BLOCK_ROWS, *MEGATRON_FLAGS, EXPERIMENTAL_ATTENTION_VARIANT),
    active=deals_blocks,
    options=BlockOptions.of,
    check=check_block_rows,
    doc="cp-block-rows.md",
    patches=(
        Patch(
            "megatron.core.utils:get_batch_on_this_cp_rank",
            "wrap",
            f"{_IMPL}.rows:slice_batch",
            "Megatron cuts batches into two chunks for each rank",
            params=("batch",),
            versions=">=0.12.1,<0.21",
        ),
        Patch(
            "megatron.core.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank",
            "wrap",
            f"{_IMPL}.rows:slice_angles",
            "Megatron's rotary angles are those of two chunks",
            params=("pos_emb", "seq_dim"),
            versions=">=0.12.1,<0.21",
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:roll_tensor",
            "wrap",
            f"{_IMPL}.rows:roll_rows",
            "Megatron's multi-token prediction exchanges the borders of two chunks",
            params=("tensor", "shifts", "dims"),
            versions=">=0.12.1,<0.21",
        ),
    ),
)
