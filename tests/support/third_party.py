"""What Megatron imports of others, and what features of torch import when tests first use them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path

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


def or_skip(name: str) -> None:
    """Skip the test module where a package is missing; importing it to see takes seconds.

    Those that need Megatron in other processes alone never import it in this one.
    """
    with contextlib.suppress(ModuleNotFoundError):  # the package that it is in
        if importlib.util.find_spec(name) is not None:
            return
    import pytest

    pytest.skip(f"{name} is not installed", allow_module_level=True)


def folder(name: str) -> Path:
    """Where a package lies, which is not imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
