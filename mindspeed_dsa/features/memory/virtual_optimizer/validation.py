"""What does not combine with moments in mapped host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.memory.moved_state import check_moved_adam
from mindspeed_dsa.features.memory.virtual_optimizer.options import Options
from mindspeed_dsa.megatron.configuration import argument


def check_mapped_moments(args: Any, options: Options) -> Iterator[str]:
    """What in arguments, or in an optimizer's configuration, does not combine with the feature."""
    yield from check_moved_adam(args, "--virtual-optimizer")
    yield from check_quotas(args, options)


def check_quotas(args: Any, options: Options) -> Iterator[str]:
    """Quotas that are none, or do not fit the number of pipeline stages, where ``args`` has it."""
    if options.words:
        try:
            options.quota(0, argument(args, "pipeline_model_parallel_size") or len(options.words))
        except (TypeError, ValueError) as error:
            yield str(error)
