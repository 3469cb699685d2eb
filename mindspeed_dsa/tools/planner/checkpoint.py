"""Estimates the size of a job's checkpoint from its command line."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_dsa.features.dsa.model.feature import fill_arguments
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner import arguments, flags, sizes

MASTER, MOMENTS = 4, 8
"""Bytes per parameter of master weight and of two moments, in fp32."""
_WITHOUT_OPTIMIZER = "--no-save-optim"


def size_of(command: Sequence[str], vocabulary: int | None = None) -> float | None:
    """Return the bytes of one checkpoint, or None if flags for the model's sizes are missing.

    A checkpoint has the weights in their dtype and the optimizer's moments in fp32. With 16-bit weights or a
    distributed optimizer, it also has the fp32 master weights.

    Args:
        command: job's command line, whose first word may be its script.
        vocabulary: padded vocabulary size, if the tokenizer has been read.
    """
    try:
        options, _, _ = flags.read(command)
        fill_arguments(options)
        options.padded_vocab_size = vocabulary or options.padded_vocab_size
        if arguments.unknown_sizes(options):
            return None
        model = arguments.model_of(options)
    except (SettingsError, TypeError, ValueError):  # the job's own parser reports these
        return None
    half = options.bf16 or options.fp16
    # bytes per parameter: with bf16, Adam and its master weights 2 + 4 + 8 = 14
    nbytes = 2 if half else 4
    if _WITHOUT_OPTIMIZER not in command:
        nbytes += MASTER if half or options.use_distributed_optimizer else 0
        nbytes += MOMENTS if options.optimizer == "adam" else MOMENTS // 2  # SGD has only the momentum
    return float(nbytes * sum(weight.numbers for weight in sizes.model_weights(model)))
