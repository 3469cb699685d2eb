"""What does not combine with optimizer state on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.memory.moved_state import Row, check_arguments, check_moved_adam
from mindspeed_dsa.features.memory.swap_optimizer.options import Options
from mindspeed_dsa.features.memory.switches import check_has_effect

_FLAG = "--swap-optimizer"
_REFUSED: tuple[Row, ...] = (
    ("qk_clip", "it changes master weights on the device, and there are none", "omit --qk-clip"),
    (
        "log_params_norm",
        "it reads the master weights on the device, and there are none",
        "omit --log-params-norm",
    ),
)


def check_swapped_state(args: Any, options: Options) -> Iterator[str]:
    """What in arguments, or in an optimizer's configuration, does not combine with the feature."""
    yield from check_moved_adam(args, _FLAG)
    yield from check_arguments(args, _FLAG, _REFUSED)
    if options.times is not None and options.times < 1:
        yield f"{_FLAG}-times {options.times}: a step has at least one part; use 1 or more"
    yield from check_has_effect(options.switched_on, _FLAG, swap_optimizer_times=options.times)
