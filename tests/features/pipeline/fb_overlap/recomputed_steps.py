"""Worker functions: training steps in pairs with recomputation, with counts and kept memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_dsa.features.pipeline.fb_overlap.recompute import Recomputed
from mindspeed_dsa.features.pipeline.recompute_ahead.ahead import Ahead
from tests.features.pipeline.fb_overlap import paired_steps
from tests.support import model
from tests.support.contexts import running


def trained(**arguments: Any) -> dict[str, Any]:
    """Run ``paired_steps.trained``; also return how often each piece was recomputed."""
    with _run_again() as pieces:
        result = paired_steps.trained(**arguments)
    context = running("recompute-ahead")
    return {**result, "pieces": pieces, "when": context.state(Ahead).recomputed if context else None}


@contextmanager
def _run_again() -> Iterator[dict[str, int]]:
    counts = {"recompute_before": 0, "recompute_experts": 0}

    def counting(name: str) -> Any:
        original = getattr(Recomputed, name)

        def recompute(self: Any) -> None:
            counts[name] += 1
            original(self)

        return mock.patch.object(Recomputed, name, recompute)

    with counting("recompute_before"), counting("recompute_experts"):
        yield counts


def counted(**arguments: Any) -> dict[str, Any]:
    """Return the values that a step adds to Megatron's sums: router and indexer losses, tokens per expert."""
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.moe import moe_utils

    finalize_model_grads = import_module("megatron.core.distributed.finalize_model_grads")
    tokens: list[Any] = []
    update = finalize_model_grads.get_updated_expert_bias

    def updated(counts: Any, *rest: Any, **kwargs: Any) -> Any:
        tokens.append(counts.clone())
        return update(counts, *rest, **kwargs)

    with mock.patch.object(finalize_model_grads, "get_updated_expert_bias", updated):
        result = trained(**arguments)
    routers = moe_utils.get_moe_layer_wise_logging_tracker()
    return {
        **result,
        "tokens": tokens,
        "routers": {name: each["values"].clone() for name, each in routers.items()},
        "indexers": dsa.DSAIndexerLossLoggingHelper.tracker["values"].clone(),
    }


class _Storages(TorchDispatchMode):
    """Records the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                # Views share their base's storage, which counts once.
                self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return result

    def alive(self) -> int:
        """Return the bytes of all storages that are still referenced."""
        gc.collect()
        self._made = {key: each for key, each in self._made.items() if not each[0].expired()}
        return sum(size for _, size in self._made.values())


def kept(
    layers: int, overrides: dict[str, Any], micro_batch_size: int, switches: dict[str, Any] | None = None
) -> int:
    """Return the bytes that the first microbatch's forward keeps once its loss is computed."""
    storages = _Storages()
    levels: list[int] = []

    def looked_at(original: Any) -> Any:
        # Looked at before the first forward, and before its loss.
        def look(*args: Any) -> Any:
            levels.append(storages.alive())
            return original(*args)

        return look

    train_step = model.train_step

    def watched(*args: Any) -> Any:
        with storages:
            return train_step(*args)

    with (
        mock.patch.object(model, "forward_step", looked_at(model.forward_step)),
        mock.patch.object(model, "loss_of", looked_at(model.loss_of)),
        mock.patch.object(model, "train_step", watched),
    ):
        model.run(
            {**paired_steps.SWITCH, **(switches or {})},
            {"num_layers": layers, "moe_layer_freq": 1, **overrides},
            num_microbatches=2,
            micro_batch_size=micro_batch_size,
            ep=2,
            etp=1,
        )
    return levels[1] - levels[0]
