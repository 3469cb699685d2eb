"""The zigzag of rows repeated in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.context_parallel.algorithms import BLOCK_ROWS, MEGATRON_FLAGS, Algorithms
from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options(Algorithms):
    """The rows of a job's context parallel ranks."""


def wanted(settings: Any) -> bool:
    """Whether rows are dealt in blocks."""
    chosen = Options.of(settings)
    return chosen.ranks > 1 and chosen.block_rows > 0


def check_block_rows(args: Any, options: Options) -> Iterator[str]:
    """Report attentions and batches that know Megatron's rows only; absent arguments are not checked."""
    if options.ranks == 1 or not options.block_rows:
        return
    if argument(args, "experimental_attention_variant") != "dsa":
        yield (
            "--cp-block-rows balances sparse attention, and the model has none; omit it or add "
            "--experimental-attention-variant dsa"
        )
    release = versions.of_megatron(getattr(args, "megatron_root", "megatron"))
    if release is not None and release in SpecifierSet(">=0.19", prereleases=True):
        yield f"--cp-block-rows: the attention of Megatron-core {release} knows its own rows only; omit it"


_IMPL = "mindspeed_dsa.features.dsa.block_rows.rows"
_RELEASES = ">=0.12.1,<0.19"

FEATURE = Feature(
    name="cp-block-rows",
    summary="Deals rows to context parallel ranks in small blocks, which balances sparse attention.",
    flags=(BLOCK_ROWS, *MEGATRON_FLAGS, EXPERIMENTAL_ATTENTION_VARIANT),
    active=wanted,
    options=Options.of,
    check=check_block_rows,
    doc="cp-block-rows.md",
    patches=(
        Patch(
            "megatron.core.utils:get_batch_on_this_cp_rank",
            "wrap",
            f"{_IMPL}:slice_batch",
            "batches are cut into two chunks for each rank",
            params=("batch",),
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank",
            "wrap",
            f"{_IMPL}:slice_angles",
            "rotary angles are those of two chunks",
            params=("pos_emb", "seq_dim"),
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:roll_tensor",
            "wrap",
            f"{_IMPL}:roll_rows",
            "multi-token prediction exchanges the borders of two chunks",
            params=("tensor", "shifts", "dims"),
            versions=_RELEASES,
        ),
    ),
)
