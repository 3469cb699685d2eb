"""CUDA packages that frameworks import, as modules with empty classes."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

TRANSFORMER_ENGINE = (
    "transformer_engine",
    "transformer_engine.common",
    "transformer_engine.common.recipe",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.attention",
    "transformer_engine.pytorch.attention.rope",
    "transformer_engine.pytorch.cpp_extensions",
    "transformer_engine.pytorch.cpu_offload",
    "transformer_engine.pytorch.cross_entropy",
    "transformer_engine.pytorch.distributed",
    "transformer_engine.pytorch.float8_tensor",
    "transformer_engine.pytorch.fp8",
    "transformer_engine.pytorch.optimizers",
    "transformer_engine.pytorch.permutation",
    "transformer_engine.pytorch.router",
    "transformer_engine.pytorch.tensor",
    "transformer_engine.pytorch.tensor.utils",
    "transformer_engine.pytorch.utils",
)
MODELOPT = (
    "modelopt",
    "modelopt.torch",
    "modelopt.torch.distill",
    "modelopt.torch.distill.plugins",
    "modelopt.torch.distill.plugins.megatron",
    "modelopt.torch.opt",
    "modelopt.torch.opt.plugins",
    "modelopt.torch.prune",
    "modelopt.torch.prune.plugins",
    "modelopt.torch.quantization",
    "modelopt.torch.utils",
    "modelopt.torch.utils.distributed",
    "modelopt.torch.utils.plugins",
)


class _Empty(ModuleType):
    """Module with any name as attribute: a module if it begins in lower case, else a layer class."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "2.10.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name) if name[0].islower() else type(name, (torch.nn.Module,), {})


def load(names: tuple[str, ...]) -> None:
    """Put empty modules in place of packages."""
    for name in names:
        module = _Empty(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
