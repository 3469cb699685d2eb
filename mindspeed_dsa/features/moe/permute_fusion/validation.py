"""What does not combine with the fused permutation."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.features.moe.permute_fusion.options import Options
from mindspeed_dsa.megatron.configuration import argument

_FLAG = "--moe-permute-fusion"


def check_permute_fusion(args: Any, options: Options) -> Iterator[str]:
    """What in arguments, or in a model's configuration, does not combine with the feature."""
    if options.may_leave_it and find_spec("transformer_engine") is not None:
        return
    if argument(args, "moe_token_dispatcher_type") == "flex":
        yield (
            f"{_FLAG} serves the dispatchers alltoall and allgather, and flex permutes for its own kernels; "
            "use --moe-token-dispatcher-type alltoall, or omit the flag"
        )
