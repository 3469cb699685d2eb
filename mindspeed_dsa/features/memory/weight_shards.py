"""Weights that modules gather from shards of their own, which Megatron-core has since 0.19."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.megatron.configuration import argument


def check_weight_shards(args: Any, flag: str) -> Iterator[str]:
    """A problem where weights have more shards than there are tensor parallel ranks.

    Args:
        args: arguments or a configuration.
        flag: of the feature.
    """
    ranks = argument(args, "tensor_model_parallel_size") or 1
    for kind, whole in (("", ranks), ("expert_", argument(args, "expert_tensor_parallel_size") or ranks)):
        name = f"{kind}tensor_parallel_num_weight_shards"
        shards = argument(args, name) or 1
        if shards > whole:
            yield (
                f"{flag} does not combine with --{name.replace('_', '-')} {shards}: modules then gather "
                "weights in forward and backward, into memory that this knows nothing of; use "
                f"{whole} or omit one of them"
            )
