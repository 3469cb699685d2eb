"""Training steps of models whose layers share selections; they run inside the pool's workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any
from unittest import mock

import torch
from packaging.version import Version
from torch import Tensor

from mindspeed_dsa.megatron import selection_source
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from tests.matrix import model as tiny
from tests.matrix import steps
from tests.support import model as job

LAYERS = 8
MODEL = {"num_layers": LAYERS, "moe_layer_freq": [0, 1] * (LAYERS // 2)}


def step(
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    repaired: bool = True,
    seed: int = 0,
    **arguments: Any,
) -> dict[str, Any]:
    """Run :func:`steps.step`; add the numbers of stored selections and of selections left over.

    Without ``repaired``, selections are stored where Megatron-core 0.19 stores them. Token ids are drawn with
    ``seed``. ``nearest`` of the result is the smallest causal ``|query * key|`` of Megatron's own indexers,
    ``None`` where none computed any.
    """
    overrides = {**MODEL, **communication(**arguments), **(overrides or {})}
    holder = contextlib.nullcontext() if repaired else _megatrons_holder()
    store = selection_source.Selections.store
    with (
        holder,
        _nearest_to_zero() as nearest,
        mock.patch.object(job, "samples", partial(job.samples, seed=seed)),
        mock.patch.object(selection_source.Selections, "store", autospec=True, side_effect=store) as stored,
    ):
        result = steps.step(switches, overrides, **arguments)
    stores = {"selected": stored.call_count, "left": selection_source.current().latest}
    return {**result, **stores, "nearest": min(nearest, default=None)}


def error_of_fork(form: str, **arguments: Any) -> str:
    """Run a step on a fork whose layers carry selections themselves; return the error, or nothing.

    Args:
        form: ``forward``: layers that share have an attention of their own; ``indexer``: they are built
            without the attribute ``indexer``.
        **arguments: arguments of :func:`step`.
    """
    build = tiny.gpt_model

    def build_fork(cfg: Any, *stage: Any) -> Any:
        from megatron.core.transformer.experimental_attention_variant import dsa

        initialise = dsa.DSAttention.__init__

        def without_indexer(self: Any, *args: Any, **kwargs: Any) -> None:
            initialise(self, *args, **kwargs)
            if form == "indexer" and not Sharing.of(cfg).computes(self.layer_number):
                del self.indexer

        with mock.patch.object(dsa.DSAttention, "__init__", without_indexer):
            model = build(cfg, *stage)
        for layer in model.decoder.layers:
            attention = layer.self_attention.core_attention
            if not Sharing.of(cfg).computes(layer.layer_number):
                attention.forward = partial(_attend_alone, cfg)
        return model

    with mock.patch.object(tiny, "gpt_model", build_fork):
        try:
            step(**arguments)
        except SettingsError as error:
            return str(error)
    return ""


def _attend_alone(cfg: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return an attention output ``[rows, batch, heads * value_dim]`` that reads no selection."""
    return query.flatten(2).mean(-1, keepdim=True).repeat(1, 1, cfg.num_attention_heads * cfg.v_head_dim)


def communication(cp: int = 1, **others: Any) -> dict[str, Any]:
    """Return the key communication setting that context parallel DSA needs from 0.19 on."""
    is_told = cp > 1 and Version(str(versions.of_megatron())) >= Version("0.19")
    return {"cp_comm_type": "allgather"} if is_told else {}


@contextlib.contextmanager
def _nearest_to_zero() -> Iterator[list[float]]:
    """Collect the smallest causal ``|query * key|`` of each call of Megatron's indexers."""
    relu, nearest = torch.relu, []

    def recorded(scores: Tensor) -> Tensor:
        if scores.dim() == 4:  # [queries, batch, heads, keys]
            causal = torch.ones(scores.size(0), scores.size(3), dtype=torch.bool).tril()
            nearest.append(float(scores.detach().abs().amin((1, 2))[causal].min()))
        return relu(scores)

    with mock.patch.object(torch, "relu", recorded):
        yield nearest


@contextlib.contextmanager
def _megatrons_holder() -> Iterator[None]:
    """Run a step with Megatron's unpatched methods, taken from a second copy of its module."""
    train_step = job.train_step

    def step_with_copies(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.transformer.experimental_attention_variant import dsa

        spec = spec_from_file_location(f"{dsa.__name__}_copy", str(dsa.__file__))
        assert spec is not None
        assert spec.loader is not None
        copy = module_from_spec(spec)
        spec.loader.exec_module(copy)
        names = ("_get_index_share_topk_holder", "_get_index_share_topk_length_holder")
        originals = {name: getattr(copy.DSAttention, name) for name in names}
        with mock.patch.multiple(dsa.DSAttention, **originals):
            return train_step(*args, **kwargs)

    with mock.patch.object(job, "train_step", step_with_copies):
        yield
