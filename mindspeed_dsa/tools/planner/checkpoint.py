"""Size of a job's checkpoint, from its command line."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_dsa.features.dsa.model.feature import fill_arguments
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner import arguments, flags, sizes
from mindspeed_dsa.tools.planner.memory import MASTER, MOMENTS

_WITHOUT_OPTIMIZER = "--no-save-optim"


def size_of(command: Sequence[str], vocabulary: int | None = None) -> float | None:
    """Return the bytes of one checkpoint; None where the flags do not say the sizes of the model.

    What Megatron saves: weights in their own type; for each of them a float32 copy, where the weights are of
    16 bits or the optimizer is distributed; and what the optimizer remembers, in float32.

    Args:
        command: the job's command line, whose first word may be its script.
        vocabulary: rows of the embedding, once the tokenizer has been read.
    """
    try:
        options, _, _ = flags.read(command)
        fill_arguments(options)
        options.padded_vocab_size = vocabulary or options.padded_vocab_size
        if arguments.unknown_sizes(options):
            return None
        model = arguments.model_of(options)
    except (SettingsError, TypeError, ValueError):  # which the job's own parser reports
        return None
    half = options.bf16 or options.fp16
    each = 2 if half else 4
    if _WITHOUT_OPTIMIZER not in command:
        each += MASTER if half or options.use_distributed_optimizer else 0
        each += MOMENTS if options.optimizer == "adam" else MOMENTS // 2  # SGD has momentum alone
    return float(each * sum(weight.numbers for weight in sizes.model_weights(model)))
