"""The switch that packs documents."""

from __future__ import annotations

from mindspeed_dsa.context_parallel.algorithms import BLOCK_ROWS, CONTEXT_PARALLEL_SIZE
from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.attention.packs.arguments import reset_at_documents
from mindspeed_dsa.features.attention.packs.options import Options
from mindspeed_dsa.features.attention.packs.validation import check_packs
from mindspeed_dsa.megatron.dsa import megatron_flag
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.attention.packs.delivery"
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
        megatron_flag("--mtp-num-layers", int),
    ),
    options=Options.of,
    rewrite=reset_at_documents,
    validate=check_packs,
    doc="pack-documents.md",
    patches=(
        Patch(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            "wrap",
            f"{_IMPL}:deliver_packs",
            "the stages between the first and the last see no batch, and would attend across documents",
        ),
        Patch(
            f"{_GPT}.forward",
            "wrap",
            f"{_IMPL}:with_pack",
            "scripts do not pass the lengths of documents on",
            params=("packed_seq_params",),
        ),
        Patch(
            f"{_GPT}.build_schedule_plan",
            "wrap",
            f"{_IMPL}:with_pack",
            "scripts do not pass the lengths of documents on",
            params=("packed_seq_params",),
            versions=">=0.14",
            required=False,
        ),
        Patch(
            "megatron.core.utils:get_batch_on_this_cp_rank",
            "wrap",
            f"{_IMPL}:deal_rows",
            "packs are cut into chunks as whole sequences are, which balances no work",
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
            priority=100,  # outside of what knows whole sequences only
        ),
        Patch(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
            "wrap",
            "mindspeed_dsa.megatron.local_attention:attend_to_own_document",
            "Megatron's own dense attention refuses packs",
            params=("query", "key", "value", "attention_mask", "attn_mask_type", "packed_seq_params"),
            priority=100,  # outside of what knows whole sequences only
        ),
    ),
)
