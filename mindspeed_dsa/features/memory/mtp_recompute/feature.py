"""Declaration of mtp-recompute: full recompute of multi-token prediction layers, on every release.

tests: tests/matrix/test_memory.py
"""

from __future__ import annotations

from typing import Any

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.megatron.dsa import megatron_flag
from mindspeed_dsa.patches.spec import Patch

_SWITCH = Flag(
    "--mtp-recompute",
    "Repair Megatron's full recomputation of layers of multi-token prediction. Default: on if the model has "
    "such layers and --recompute-granularity is full.",
    kind="auto",
)


def mtp_recompute_wanted(settings: Any) -> bool:
    """Return whether multi-token prediction layers are fully recomputed; an explicit switch has priority."""
    choice = getattr(settings, _SWITCH.dest, None)
    if choice is not None:
        return bool(choice)
    granularity = getattr(settings, "recompute_granularity", None)
    return granularity == "full" and bool(getattr(settings, "mtp_num_layers", None))


_TARGET = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._checkpointed_forward"
_IMPL = "mindspeed_dsa.features.memory.mtp_recompute.checkpointed_layers"

FEATURE = Feature(
    name="mtp-recompute",
    summary="Makes --recompute-granularity full work for layers of multi-token prediction: with packed "
    "sequences on 0.16 and 0.17, at all on 0.18.",
    flags=(
        _SWITCH,
        megatron_flag("--mtp-num-layers", int),
        megatron_flag("--recompute-granularity"),
    ),
    patches=(
        Patch(
            _TARGET,
            "wrap",
            f"{_IMPL}:save_tensors_alone",
            "the checkpoint saves all inputs for backward, packed sequence parameters included, and autograd "
            "saves tensors only",
            params=("forward_func",),
            versions=">=0.16,<0.18",
        ),
        Patch(
            _TARGET,
            "wrap",
            f"{_IMPL}:take_padding_mask",
            "the layer's forward passes a padding mask that the checkpointed forward does not take",
            params=("hidden_states", "decoder_input"),
            versions=">=0.18,<0.19",
        ),
    ),
    active=mtp_recompute_wanted,
    doc="mtp-recompute.md",
)
