"""``--fused-linear-cross-entropy``: output projection and loss in chunks of tokens, without full logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.expert_parallel import check_refused
from mindspeed_dsa.megatron.graphs import REST, refuse_graphs
from mindspeed_dsa.patches.spec import Patch

FLAG = "--fused-linear-cross-entropy"
_GRADIENT = Flag(
    f"{FLAG}-gradient",
    "When the gradient of the projection's weight is formed: in forward, where it is kept in fp32 until "
    "backward; in backward, from logits that are computed a second time; auto: in forward where that takes "
    "at most half of the bytes of the logits.",
    kind="value",
    default="auto",
    choices=("auto", "forward", "backward"),
)
_FLOAT = 4
_MODELS = ("use_legacy_models", "is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern")
_REFUSED = {
    "cross_entropy_loss_fusion": "is a loss of whole logits, which there are none of",
    "defer_embedding_wgrad_compute": "keeps the gradients of whole logits until the pipeline is flushed",
    "config_logger_dir": "writes whole logits to a file",
    "fp8_output_proj": "multiplies in Transformer Engine's fp8",
    "logit_dtype": "has products in another dtype than their operands",
    "logits_save_dir": "reads whole logits",
    "logits_load_dir": "reads whole logits",
    "export_kd_teacher_load": "reads whole logits",
    **dict.fromkeys(_MODELS, "has a model of its own, which is not served"),
    **dict.fromkeys(("use_megatron_fsdp", "use_custom_fsdp"), "takes gradients out of its own linear layers"),
}
"""Megatron arguments that are refused when set, with the reason."""


@dataclass(frozen=True)
class Options:
    """Options of fused-linear-cross-entropy.

    Attributes:
        gradient: pass that computes the weight's gradient: ``forward``, ``backward``, or ``auto`` to decide
            by memory.
    """

    gradient: Any

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Read the options from resolved settings."""
        return cls(gradient=getattr(settings, _GRADIENT.dest, None) or _GRADIENT.default)


def forms_in_forward(choice: str, tokens: float, hidden: int, number: int) -> bool:
    """Return whether the gradient of the projection's weight is computed in forward, and kept until backward.

    ``auto`` chooses the forward if the gradient needs at most half of the memory of full logits. Megatron's
    loss keeps logits in fp32, in addition to the 16-bit matmul output.

    Args:
        choice: ``auto``, ``forward`` or ``backward``.
        tokens: number of a microbatch's tokens on a rank.
        hidden: hidden size.
        number: bytes per element of the logits before the loss.
    """
    # The gradient and the logits are both proportional to the vocabulary, which cancels. bf16, hidden 7168:
    # 2 x 7168 x 4 bytes <= tokens x 6 bytes holds from 9558 tokens on.
    by_logit = _FLOAT + (number if number < _FLOAT else 0)
    return choice == "forward" or (choice == "auto" and 2 * hidden * _FLOAT <= tokens * by_logit)


def check_linear_cross_entropy(args: Any, options: Any) -> Iterator[str]:
    """Yield problems with arguments that need full logits."""
    yield from check_refused(args, FLAG, _REFUSED)
    if argument(args, "fused_linear_cross_entropy_gradient") != "backward":
        why = (
            f"without {FLAG}-gradient backward, the host reads in backward which tokens were weighted "
            "otherwise than expected"
        )
        yield from refuse_graphs(args, FLAG, why, {REST})


_IMPL = "mindspeed_dsa.features.operators.linear_cross_entropy.postponed_logits"
_GPT = "megatron.core.models.gpt.gpt_model:GPTModel"
_WHY = "the output layer makes logits of all tokens before the loss is asked for, and the loss copies them"

FEATURE = Feature(
    name="fused-linear-cross-entropy",
    summary="Output projection and loss are computed together in chunks of tokens, and the logits are never "
    "whole.",
    flags=(
        Flag(FLAG, "Compute the output projection and the loss together, in chunks of tokens."),
        _GRADIENT,
    ),
    patches=(
        Patch(
            f"{_GPT}.forward",
            "wrap",
            f"{_IMPL}:postpone_logits",
            _WHY,
            params=("labels", "loss_mask"),
            versions=">=0.12.1,<0.13",
        ),
        Patch(
            f"{_GPT}._postprocess",
            "wrap",
            f"{_IMPL}:postpone_logits",
            _WHY,
            params=("labels", "loss_mask"),
            versions=">=0.13,<0.21",
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    options=Options.of,
    check=check_linear_cross_entropy,
    doc="fused-linear-cross-entropy.md",
)
