"""Digests of a model's parameters, written when the first schedule starts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.diagnostics.steps.feature import WeightsOptions

_written: set[Path] = set()
"""Files written by this process. Not stored per session: enabling another feature during training starts
a new session, when the weights are no longer the initial ones."""


def write_before_first_step(
    original: Callable[..., Any], context: Context[WeightsOptions]
) -> Callable[..., Any]:
    """Decorate ``get_forward_backward_func``: its schedule writes the digests before the first step."""

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = original(*args, **kwargs)
        file = context.options.folder / f"weights-rank{_rank():05d}.json"
        if file in _written:
            return schedule

        def schedule_with_digest(*args: Any, **kwargs: Any) -> Any:
            if file not in _written and "model" in kwargs:
                _written.add(file)
                write(file, kwargs["model"])
            return schedule(*args, **kwargs)

        return schedule_with_digest

    return get_forward_backward_func


def write(file: Path, model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Write ``{"rank", "world_size", "parameters": {name: {"sha256", "dtype", "shape"}}}``.

    Args:
        file: output file; its folder is created.
        model: module, or this rank's chunks of an interleaved pipeline.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    digests = {}
    for index, chunk in enumerate(chunks):
        prefix = f"chunk{index}." if len(chunks) > 1 else ""
        for name, parameter in chunk.named_parameters():
            digests[prefix + plain_name(name)] = digest(parameter)
    content = {"rank": _rank(), "world_size": _world_size(), "parameters": digests}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes that model wrappers add."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def digest(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the SHA-256 of this rank's shard of a parameter, with the shard's dtype and shape."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    # View as bytes, as NumPy has no bfloat16.
    values = local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    sha256 = hashlib.sha256(values).hexdigest()
    return {"sha256": sha256, "dtype": str(local.dtype).removeprefix("torch."), "shape": list(local.shape)}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
