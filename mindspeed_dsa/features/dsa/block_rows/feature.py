"""The zigzag of rows repeated in blocks."""

from __future__ import annotations

from mindspeed_dsa.context_parallel.algorithms import BLOCK_ROWS, MEGATRON_FLAGS
from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature
from mindspeed_dsa.features.dsa.block_rows.options import Options, wanted
from mindspeed_dsa.features.dsa.block_rows.validation import check_block_rows
from mindspeed_dsa.megatron.configuration import validate
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.dsa.block_rows.rows"
_RELEASES = ">=0.12.1,<0.19"

FEATURE = Feature(
    name="cp-block-rows",
    summary="Deals rows to context parallel ranks in small blocks, which balances sparse attention.",
    flags=(BLOCK_ROWS, *MEGATRON_FLAGS, EXPERIMENTAL_ATTENTION_VARIANT),
    active=wanted,
    options=Options.of,
    validate=validate(check_block_rows, Options.of),
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
