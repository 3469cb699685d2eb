"""Whether Megatron can build the model with the packages that are installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any


def check_transformer_engine(args: Any) -> Sequence[str]:
    """Report a missing Transformer Engine, which Megatron's default implementation needs."""
    if getattr(args, "transformer_impl", None) != "transformer_engine" or find_spec("transformer_engine"):
        return ()
    problem = (
        "--transformer-impl transformer_engine (Megatron's default) needs Transformer Engine, which is not "
        "installed; add --transformer-impl local"
    )
    return (problem,)
