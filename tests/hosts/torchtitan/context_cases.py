"""A layer's core attention on context parallel ranks, compared with one process that has whole sequences."""

from __future__ import annotations

import contextlib
import re
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mindspeed_dsa.context_parallel import algorithms, gather
from mindspeed_dsa.context_parallel.strategy import ContextParallelStrategy, Exchanged
from mindspeed_dsa.integrations.torchtitan.context import context_of
from mindspeed_dsa.integrations.torchtitan.latent_attention import Attention, IndexOperands, Projected
from mindspeed_dsa.integrations.torchtitan.names import GATHER, SparseOptions

BATCH, LENGTH, HEADS, NOPE, ROPE, VALUE, LATENT, INDEX = 2, 24, 3, 4, 2, 5, 6, 4
PAGE = Path(__file__).parents[3] / "docs" / "design" / "context-parallel-strategy.md"


class Ring(ContextParallelStrategy):
    """Strategy that attends by itself."""

    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> Exchanged:
        return Exchanged(query, key, value)

    def attend(self, *args: Any) -> Tensor:
        raise NotImplementedError


def register_page() -> None:
    """Register the strategy of the page about writing one."""
    if algorithms.registered("whole_sequences") is None:
        (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
        exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})


def inputs() -> dict[str, Tensor]:
    """Return the operands of whole sequences, fp64."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "query": (BATCH, LENGTH, HEADS, NOPE + ROPE),
        "key": (BATCH, LENGTH, LATENT + ROPE),
        "index_query": (BATCH, LENGTH, 2, INDEX),
        "index_key": (BATCH, LENGTH, INDEX),
        "weights": (BATCH, LENGTH, 2),
        "up": (HEADS * (NOPE + VALUE), LATENT),
        "cotangent": (BATCH, LENGTH, HEADS * VALUE),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


def attend(core: Attention, given: dict[str, Tensor], positions: Tensor | None) -> dict[str, Tensor]:
    """Run a layer forward and backward; return output, loss and gradients."""
    # Without a loss, a layer projects the indexer's operands without a graph.
    trained = [name for name in given if core.options.loss_coeff or name in ("query", "key", "up")]
    leaf = {name: x.clone().requires_grad_(name in trained) for name, x in given.items()}
    projected = Projected(leaf["query"], core.start(leaf["key"]), leaf["up"], 0.4, VALUE)
    index = IndexOperands(leaf["index_query"], core.start(leaf["index_key"]), leaf["weights"])
    trains = core.options.loss_coeff > 0
    out, loss = core.attend(projected, index, positions, trains)
    out = core.gathers_again_behind(out * 1)
    del projected, index
    (out * given["cotangent"]).sum().backward()
    found = {f"gradient of {name}": x.grad for name, x in leaf.items() if x.grad is not None}
    return {"out": out.detach(), **({} if loss is None else {"loss": loss}), **found}


def compare(
    balancer: str | None = "headtail", algorithm: str = GATHER, documents: bool = False, **options: Any
) -> list[str]:
    """Return the names of this rank's results that differ from one process's."""
    register_page()
    group, given = dist.group.WORLD, inputs()
    ranks, rank = group.size(), group.rank()
    chosen = {"topk": 5, "index_heads": 2, "index_dim": INDEX, "loss_coeff": 0.5} | options
    core = Attention(SparseOptions(**chosen, context_parallel_algo=algorithm), BATCH * LENGTH)
    positions = torch.tensor([[*range(9), *range(15)], [*range(20), *range(4)]]) if documents else None
    expected = attend(core, given, positions)

    context = context_of(group, balancer, algorithm)
    layout = context.layout if isinstance(context, ContextParallelStrategy) else context.strategy.layout
    mine = layout.rows_of_rank(rank, LENGTH)

    def own(name: str, x: Tensor) -> Tensor:
        return x if name.endswith("up") or name == "loss" else x[:, mine]

    local = {name: own(name, x) for name, x in given.items()}
    at = None if positions is None else positions[:, mine]
    found = attend(core._replace(context=context), local, at)
    for name in ("loss", "gradient of up"):
        if name in found:
            dist.all_reduce(found[name])
    if "loss" in found:
        found["loss"] /= ranks
    names = expected.keys() | found.keys()
    return sorted(
        name
        for name in names
        if name not in expected
        or name not in found
        or not torch.allclose(found[name], own(name, expected[name]), rtol=1e-9, atol=1e-11)
    )


def gathers(is_checkpointed: bool) -> tuple[int, int]:
    """Return the number of all-gathers of a layer's forward and backward, and bytes of keys between them."""
    core = Attention(SparseOptions(topk=5, index_heads=2, index_dim=INDEX), BATCH * LENGTH)
    core = core._replace(context=context_of(dist.group.WORLD, "headtail", GATHER))
    given = {name: x[:, : LENGTH // 2] if x.shape[1] == LENGTH else x for name, x in inputs().items()}
    launched: list[weakref.ref[Any]] = []
    launch = gather._Transfer._launch

    def noted(self: Any) -> None:
        launched.append(weakref.ref(self._whole.untyped_storage()))
        launch(self)

    def layer(key: Tensor, index_key: Tensor, weights: Tensor) -> Tensor:
        projected = Projected(given["query"], core.start(key), given["up"], 0.4, VALUE)
        index = IndexOperands(given["index_query"], core.start(index_key), weights)
        return core.attend(projected, index, None, True)[0]

    leaves = [given[name].clone().requires_grad_() for name in ("key", "index_key", "weights")]
    with mock.patch.object(gather._Transfer, "_launch", noted):
        if is_checkpointed:
            out = checkpoint(layer, *leaves, use_reentrant=False)
        else:
            out = layer(*leaves)
        held = sum(storage.size() for each in launched if (storage := each()) is not None)
        (out * given["cotangent"]).sum().backward()
    return len(launched), held


def order() -> tuple[list[str], list[str]]:
    """Return the order of transfers and projections in a layer's forward and backward."""
    from mindspeed_dsa.integrations.torchtitan import by_config
    from tests.hosts.torchtitan import config_registry

    config = config_registry.model().layers[0].attention
    config.rope.max_seq_len = LENGTH
    options = SparseOptions(topk=5, index_heads=4, index_dim=32)
    layer = by_config.sparse(config, options, BATCH * LENGTH).build()
    torch.manual_seed(0)
    layer.init_states()
    layer._core = layer._core._replace(context=context_of(dist.group.WORLD, "headtail", GATHER))
    layer._knows_context = True
    events: list[str] = []
    hooks = ("wo", "wq_b", "indexer.wq_b")
    for name in hooks:
        module = layer.get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: events.append(name))
        module.register_full_backward_hook(lambda *_, name=name: events.append(name))
    said = {
        "start": "start",
        "hand_out": "wait",
        "start_again": "again",
        "start_sum": "sum",
        "summed": "summed",
    }
    with contextlib.ExitStack() as patches:
        for method, event in said.items():
            original = getattr(gather._Transfer, method)

            def noted(self: Any, *args: Any, original: Any = original, event: str = event) -> Any:
                events.append(event)
                return original(self, *args)

            patches.enter_context(mock.patch.object(gather._Transfer, method, noted))
        hidden = torch.randn(BATCH, LENGTH // 2, config_registry.DIM, requires_grad=True)
        mine = layer._core.context.strategy.positions(LENGTH // 2)
        out = layer(hidden, None, mine.expand(BATCH, -1))
        forward, events = events, []
        out.sum().backward()
    return forward, events
