"""Third-party modules that Megatron or TorchTitan imports, or that torch imports on first use in tests."""

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
OF_TORCHTITAN = (
    *NAMES,
    "datasets",
    "torch.distributed.pipelining.schedules",
    "torchao.float8",
    "torchao.prototype.moe_training",
    "torchdata.stateful_dataloader",
    "tyro",
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
    """Import the installed modules."""
    for name in names:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)


def out_of_sight() -> None:
    """Freeze imported objects for the garbage collector, before later imports and before a fork."""
    # They are half a million objects. The search for stale references still sees all later imports: Megatron
    # and this library's objects.
    gc.collect()
    gc.freeze()


def or_skip(name: str) -> None:
    """Skip the test module if a package is missing, without importing it, which takes seconds.

    Modules that need Megatron only in other processes never import it in this one.
    """
    with contextlib.suppress(ModuleNotFoundError):  # the parent package is missing
        if importlib.util.find_spec(name) is not None:
            return
    import pytest

    pytest.skip(f"{name} is not installed", allow_module_level=True)


def folder(name: str) -> Path:
    """Return a package's folder without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
