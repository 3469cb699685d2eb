"""A DSA job's arguments, in which Megatron finds the algorithm that its own checks accept.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.features.dsa.key_exchange.options import GATHER, Options


def gather_keys(args: Any) -> Sequence[str]:
    """Replace the default of ``--cp-comm-type``; ``Feature.rewrite``."""
    chosen = Options.of(args)
    if getattr(args, "cp_comm_type", None) == [GATHER] or chosen.names not in ((), ("p2p",), (GATHER,)):
        return ()
    args.cp_comm_type = [GATHER]
    return (f"DSA gathers keys over --context-parallel-size {chosen.ranks}: --cp-comm-type {GATHER}",)
