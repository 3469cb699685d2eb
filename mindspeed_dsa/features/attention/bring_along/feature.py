"""DSA on Megatron-core releases that have none: indexer, core attention, fields, flags and log."""

from __future__ import annotations

from mindspeed_dsa.features.attention.declare import HERE, MLA, dsa_repair
from mindspeed_dsa.patches.spec import Patch

_BRING = f"{HERE}.bring_along"
_CONFIG = "megatron.core.transformer.transformer_config"
_RELEASES = ">=0.12.1,<0.16"
_CONFIGS = ("TransformerConfig", "MLATransformerConfig")
_FIELDS = (
    "experimental_attention_variant",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "dsa_indexer_loss_coeff",
    "dsa_indexer_use_sparse_loss",
)


def _config_patches() -> list[Patch]:
    rows = []
    for name in _CONFIGS:
        rows += [
            Patch(
                f"{_CONFIG}:{name}.__dataclass_fields__",
                "entry",
                f"{_BRING}.fields:FIELDS.{field}",
                "the configuration lacks the field, and Megatron-LM copies arguments to fields it knows",
                versions=_RELEASES,
                key=field,
            )
            for field in _FIELDS
        ]
        rows.append(
            Patch(
                f"{_CONFIG}:{name}.__init__",
                "wrap",
                f"{_BRING}.fields:accept_dsa_fields",
                "the configuration refuses fields that it does not know",
                versions=_RELEASES,
            )
        )
    return rows


FEATURE = dsa_repair(
    "dsa-bring-along",
    summary="Brings DSA to Megatron-core 0.12.1 to 0.15.3, which have none.",
    switch_help="Bring DSA along where Megatron has none.",
    patches=(
        *_config_patches(),
        Patch(
            f"{MLA}:MLASelfAttention.__init__",
            "wrap",
            f"{_BRING}.mla:build_with_dsa",
            "no spec of this release has a DSA core attention",
            params=("config", "submodules"),
            versions=_RELEASES,
        ),
        Patch(
            f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_BRING}.mla:derive_for_dsa",
            "the indexer's inputs are not passed on, and a split projection loses the rotary key's gradient",
            params=("hidden_states", "packed_seq_params", "inference_context"),
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            "wrap",
            f"{_BRING}.layer_numbers:number_in_model",
            "the attention is told its number in the pipeline stage, and the log wants that in the model",
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__",
            "wrap",
            f"{_BRING}.layer_numbers:number_after_decoder",
            "the attention of an MTP layer is told the number of a decoder layer",
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.distributed.finalize_model_grads:_allreduce_layernorm_grads",
            "wrap",
            f"{_BRING}.tp_grads:average_marked_gradients",
            "this release knows no gradients that are averaged over tensor parallel ranks",
            params=("model",),
            versions=">=0.12.1,<0.13",
        ),
        Patch(
            "megatron.training.arguments:parse_args",
            "wrap",
            f"{_BRING}.arguments:with_dsa_flags",
            "the parser has no flags for DSA",
            params=("extra_args_provider",),
            versions=_RELEASES,
            required=False,
        ),
        Patch(
            "megatron.training.training:training_log",
            "wrap",
            f"{_BRING}.arguments:log_indexer_loss",
            "nobody collects and logs the indexer loss",
            params=("total_loss_dict", "iteration"),
            versions=_RELEASES,
            required=False,
        ),
    ),
)
FEATURES = (FEATURE,)
