"""What Megatron imports of others, and what features of torch import when tests first use them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import warnings
from collections.abc import Sequence

NAMES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.experimental",
    "torch.utils.cpp_extension",
    "torch.utils.tensorboard",
    "triton",
    "wrapt",
    "yaml",
)
OF_CASES = (
    *NAMES,
    "torch._inductor.compile_fx",
    "torch.export.pt2_archive",
    "torch.nn.attention.flex_attention",
    "hypothesis",
    "pytest",
)


def load(names: Sequence[str]) -> None:
    """Import those that are installed."""
    for name in names:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)


def out_of_sight() -> None:
    """Put what was imported out of the garbage collector's sight, before others are and before a fork.

    It is half a million objects. The search for stale references still sees all that is imported later:
    Megatron and what this library holds.
    """
    gc.collect()
    gc.freeze()
