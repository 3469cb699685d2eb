"""DSA for Megatron-core releases without it: indexer, core attention, config fields, flags and log.

tests: tests/matrix/test_backport.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag
from mindspeed_dsa.features.dsa.model.feature import field_rows
from mindspeed_dsa.megatron import dsa
from mindspeed_dsa.megatron.dsa import MLA, uses_dsa
from mindspeed_dsa.patches.spec import Patch

FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--experimental-attention-variant", {"choices": ["dsa"], "help": "Kind of attention: dsa."}),
    ("--dsa-indexer-n-heads", {"type": int, "help": "Number of indexer heads."}),
    ("--dsa-indexer-head-dim", {"type": int, "help": "Dimension of each indexer head."}),
    ("--dsa-indexer-topk", {"type": int, "help": "Number of keys that each query attends to."}),
    (
        "--dsa-indexer-loss-coeff",
        {"type": float, "help": "Coefficient of the indexer loss; unset or 0: no loss."},
    ),
    (
        "--dsa-indexer-use-sparse-loss",
        {
            "action": "store_true",
            "help": "Compute the indexer loss over the selected keys only, not over all visible ones.",
        },
    ),
)


def with_dsa_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``megatron.training.arguments.parse_args`` to add DSA's flags with ``extra_args_provider``."""

    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def provider(parser: Any) -> Any:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return add_dsa_flags(parser)

        return original(provider, *args, **kwargs)

    return parse_args


def add_dsa_flags(parser: Any) -> Any:
    """Add DSA's flags to an argparse parser, unless it has them already (as in some forks)."""
    missing = [(name, options) for name, options in FLAGS if name not in parser._option_string_actions]
    if missing:
        group = parser.add_argument_group(title="DeepSeek sparse attention")
        for name, options in missing:
            group.add_argument(name, **options)
    return parser


@dataclass(frozen=True)
class Options:
    """Options of the DSA backport.

    Attributes:
        dsa: options of fused DSA, with every part on our operators because this Megatron has no DSA.
    """

    dsa: dsa.Options

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings."""
        return cls(
            dsa=replace(dsa.Options.of(settings), indexer=True, attention=True, kl_loss=True),
        )


_IMPL = "mindspeed_dsa.features.dsa.backport"
_RELEASES = ">=0.12.1,<0.16"
_FIELDS = (
    "experimental_attention_variant",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "dsa_indexer_loss_coeff",
    "dsa_indexer_use_sparse_loss",
)

BACKPORT = Flag(
    "--dsa-backport",
    "Add DSA to a Megatron that lacks it. Default: on if the model uses DSA.",
    kind="auto",
)


def wanted(settings: Any) -> bool:
    """Return whether the backport's flag is on, or is not set and the model uses DSA."""
    choice = getattr(settings, BACKPORT.dest, None)
    return uses_dsa(settings) if choice is None else bool(choice)


FEATURE = Feature(
    name="dsa-backport",
    summary="DSA on Megatron-core 0.12.1 to 0.15.3, which lack it.",
    flags=(BACKPORT, EXPERIMENTAL_ATTENTION_VARIANT),
    active=wanted,
    options=Options.of,
    # The classes include the fixes of later releases and read the same flags as fused-dsa and dsa-absorb.
    supplies=("fused-dsa", "dsa-absorb"),
    doc="dsa-backport.md",
    patches=(
        *field_rows(_FIELDS, f"{_IMPL}.job:FIELDS", _RELEASES),
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            "wrap",
            f"{_IMPL}.job:check_dsa_fields",
            "Megatron's configuration does not know what DSA's fields need",
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.parallel_state:destroy_model_parallel",
            "wrap",
            "mindspeed_dsa.features.dsa.indexer_loss:forget_losses",
            "a step that failed leaves losses, and groups that are gone, to the next job of the process",
            versions=_RELEASES,
        ),
        Patch(
            f"{MLA}:MLASelfAttention.__init__",
            "wrap",
            f"{_IMPL}.latent_attention:build_with_dsa",
            "no spec of this release has a DSA core attention",
            params=("config", "submodules"),
            versions=_RELEASES,
        ),
        Patch(
            f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.latent_attention:derive_for_dsa",
            "MLA does not pass the indexer's inputs on, and split, it loses the rotary key's gradient",
            params=("hidden_states", "packed_seq_params", "inference_context"),
            versions=_RELEASES,
            in_place_of="layers with DSA",
        ),
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            "wrap",
            f"{_IMPL}.job:number_in_model",
            "attention layers get their number in the pipeline stage, and the log needs that in the model",
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__",
            "wrap",
            f"{_IMPL}.job:number_after_decoder",
            "the attention of an MTP layer gets the number of a decoder layer",
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.distributed.finalize_model_grads:_allreduce_layernorm_grads",
            "wrap",
            f"{_IMPL}.job:average_marked_gradients",
            "this release does not support averaging gradients over tensor parallel ranks",
            params=("model",),
            versions=">=0.12.1,<0.13",
        ),
        Patch(
            "megatron.training.arguments:parse_args",
            "wrap",
            f"{_IMPL}.feature:with_dsa_flags",
            "Megatron-LM's parser has no flags for DSA",
            params=("extra_args_provider",),
            versions=_RELEASES,
            required=False,
        ),
        Patch(
            "megatron.training.training:training_log",
            "wrap",
            f"{_IMPL}.job:log_indexer_loss",
            "Megatron-LM neither collects nor logs the indexer loss",
            params=("total_loss_dict", "iteration"),
            versions=_RELEASES,
            required=False,
        ),
    ),
)
