"""Indexers of four layers that share one selection, compared with four that all select: time and bytes."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.dsa.forms import chosen, operands_in
from benchmarks.dsa.problem import Sizes, make_inputs
from benchmarks.registry import Metrics
from mindspeed_dsa.features.dsa.main_attention import attend_sparsely
from mindspeed_dsa.features.dsa.selections.share import decoder_place
from mindspeed_dsa.megatron.selection_source import Place, Selections
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.ops.indexer_kl_loss import indexer_kl_loss
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.rotary import rotate, rotation
from mindspeed_dsa.tools.planner.activations import shared_selection
from mindspeed_dsa.tools.planner.job import Features, Job, Layout, Model, Training

LAYERS = 4
EACH, SHARED = "each", "shared"
_CLOCKS = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}


@dataclass
class Spent:
    """Time in the indexer during a step: wall-clock, and CPU time of all threads."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_CLOCKS, 0.0))

    @contextmanager
    def more(self) -> Iterator[None]:
        """Add the block's time."""
        started = {kind: clock() for kind, clock in _CLOCKS.items()}
        yield
        for kind, clock in _CLOCKS.items():
            self.seconds[kind] += clock() - started[kind]


class Layer:
    """Inputs of one layer, in Megatron's layout with a batch of 1, and the weights of its indexer.

    Args:
        sizes: problem sizes.
        seed: random seed.
        dtype: dtype of inputs and weights.
    """

    def __init__(self, sizes: Sizes, seed: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

        self.sizes = sizes
        self.inputs, self.grad_out = make_inputs(sizes, dtype, seed)
        # Only the indexer's own loss trains it: its inputs are detached.
        self.hidden = normal(sizes.length, 1, sizes.hidden_dim) * sizes.hidden_dim**0.5
        self.latent_query = normal(sizes.length, 1, sizes.query_rank) * sizes.query_rank**0.5
        self.wq_b = normal(sizes.index_heads * sizes.index_dim, sizes.query_rank)
        self.wk = normal(sizes.index_dim, sizes.hidden_dim)
        self.norm_weight, self.norm_bias = torch.ones(sizes.index_dim), torch.zeros(sizes.index_dim)
        self.norm_weight, self.norm_bias = self.norm_weight.to(dtype), self.norm_bias.to(dtype)
        self.weights_proj = normal(sizes.index_heads, sizes.hidden_dim)
        steps = 1e4 ** -(torch.arange(0, sizes.rope_dim, 2) / sizes.rope_dim)
        # [length, 1, 1, rope_dim]: neighbours are a pair.
        self.angles = (torch.arange(sizes.length)[:, None] * steps).repeat_interleave(2, -1)[:, None, None]
        for weight in self.weights:
            weight.requires_grad_()

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Weights of the indexer."""
        return self.wq_b, self.wk, self.norm_weight, self.norm_bias, self.weights_proj

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and weights of the index heads, batch first, including all scales."""
        sizes = self.sizes
        query = F.linear(self.latent_query, self.wq_b).unflatten(-1, (sizes.index_heads, sizes.index_dim))
        key = F.linear(self.hidden, self.wk)
        key = F.layer_norm(key, key.shape[-1:], self.norm_weight, self.norm_bias, 1e-6)[:, :, None]
        turn = rotation(self.angles, 1.0, "pairs", query)
        query, key = rotate(query, turn), rotate(key, turn).squeeze(2)
        weights = F.linear(self.hidden, self.weights_proj) * (sizes.index_heads * sizes.index_dim) ** -0.5
        return query.transpose(0, 1), key.transpose(0, 1), weights.transpose(0, 1)


@dataclass(frozen=True)
class Step:
    """Results of one forward and backward of all layers.

    Attributes:
        results: each layer's output, and the gradients of its attention's inputs.
        selection_bytes: bytes of the selections alive at the end of forward.
        indexer: time in the indexers.
        whole: time of the step.
    """

    results: list[tuple[Tensor, ...]]
    selection_bytes: int
    indexer: Spent
    whole: Spent


def step(layers: Sequence[Layer], places: Sequence[Place]) -> Step:
    """Run all layers forward, then all backward.

    Args:
        layers: layers in order.
        places: these layers' places in the sharing pattern. A layer that does not select attends to the keys
            of the nearest selecting layer below.
    """
    indexer, whole, holder = Spent(), Spent(), Selections()
    with whole.more():
        outputs, selections, losses = [], [], []
        for layer, place in zip(layers, places, strict=True):
            sizes = layer.sizes
            if place.computes:
                with indexer.more():
                    index = layer.project()
                    topk_indices, topk_scores = lightning_indexer(*index, sizes.topk)
                    holder.store(place, topk_indices)
            else:
                (topk_indices,) = holder.read(place).topk_indices
                holder.release(place)
            selections.append(topk_indices)
            operands = operands_in(chosen(sizes), layer.inputs, sizes)
            # Only the loss of a selecting layer reads the attention sum.
            attended = attend_sparsely(operands, topk_indices, "auto", with_sum=place.computes)
            outputs.append(attended.out)
            loss = None
            if place.computes:
                query, key = operands.detached()
                with indexer.more():
                    loss = indexer_kl_loss(
                        *index,
                        query,
                        key if operands.absorbed else key[:, :, 0],  # unread, given the attention sum
                        topk_indices,
                        sizes.softmax_scale,
                        topk_scores=topk_scores,
                        attention_sum=attended.attention_sum,
                    )
            losses.append(loss)
        # Layers that share hold the same storage, which counts once.
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in selections}
        results = []
        for layer, out, loss in zip(reversed(layers), reversed(outputs), reversed(losses), strict=True):
            gradients = torch.autograd.grad(out, layer.inputs.of_attention, layer.grad_out)
            results.append((out.detach(), *gradients))
            if loss is not None:
                with indexer.more():
                    torch.autograd.grad(loss, layer.weights)
    return Step(results[::-1], sum(storages.values()), indexer, whole)


def four_places(sharing: Sharing) -> list[Place]:
    """Return the places of the first group of exactly four layers that share the lowest one's selection.

    Raises:
        ValueError: the model has no such group.
    """
    for first in range(1, 2 * max(sharing.frequency, sharing.offset, LAYERS)):
        layers = range(first, first + LAYERS)
        places = [decoder_place(sharing, layer, layers.stop) for layer in layers]
        if [place.computes for place in places] == [True, *(False,) * (LAYERS - 1)] and places[-1].is_last:
            return places
    raise ValueError(f"{sharing} has no layer that selects for {LAYERS - 1} above it")


def own_places() -> list[Place]:
    """Return the places of four layers that all select."""
    return [decoder_place(Sharing(), layer, LAYERS) for layer in range(1, LAYERS + 1)]


def require_same_results(sizes: Sizes, places: Sequence[Place]) -> None:
    """Check that sharing layers equal layers that select the same keys themselves, bit by bit.

    Args:
        sizes: problem sizes.
        places: places of the sharing layers.

    Raises:
        RuntimeError: an output or a gradient differs.
    """
    layers = [Layer(sizes, seed) for seed in range(LAYERS)]
    for layer in layers[1:]:  # with one indexer and one input all layers select the same keys
        for name in ("hidden", "latent_query", "wq_b", "wk", "norm_weight", "norm_bias", "weights_proj"):
            setattr(layer, name, getattr(layers[0], name))
    sides = step(layers, own_places()), step(layers, places)
    for number, (one, other) in enumerate(zip(*(side.results for side in sides), strict=True), 1):
        if not all(map(torch.equal, one, other)):
            raise RuntimeError(f"layer {number} of {LAYERS} differs with the selection of another layer")


def planned_bytes(sizes: Sizes) -> int:
    """Return the bytes that a plan counts for one selection of four layers."""
    model = Model(
        layers=LAYERS,
        hidden=sizes.hidden_dim,
        ffn=1,
        heads=sizes.heads,
        vocabulary=1,
        pattern=(False,) * LAYERS,
        sparse=True,
        topk=sizes.topk,
        sharing=Sharing(pattern="CSSS"),
    )
    job = Job(model, Layout(), Training(sizes.length, micro=1, batch=1), Features(attention=True))
    return int(sum(shared_selection(job, kind).nbytes for kind in model.kinds))


def measure(sizes: Sizes, sharing: Sharing, rounds: int) -> Metrics:
    """Time both sides in alternation in this process; return medians over rounds.

    Args:
        sizes: sizes of each layer.
        sharing: pattern of selecting layers.
        rounds: steps per side.

    Returns:
        ``indexer_time_ratio``: CPU time in the indexers, forward and backward, with sharing over without;
        ``indexer_wall_ratio``: the same in wall-clock time; ``step_time_ratio``: CPU time of the whole step;
        all times; ``selection_bytes`` of both sides, and the planned bytes with sharing.
    """
    places = {EACH: own_places(), SHARED: four_places(sharing)}
    require_same_results(replace(sizes, length=192, topk=48), places[SHARED])
    print("layers that share give the same bits as layers that select the same keys", file=sys.stderr)
    layers = [Layer(sizes, seed) for seed in range(LAYERS)]
    taken: dict[str, list[Step]] = {side: [] for side in places}
    for number in range(rounds + 1):
        for side, of_side in places.items():
            # Kept results would take memory in every round.
            done = replace(step(layers, of_side), results=[])
            if number > 0:  # the first one is the warm-up
                taken[side].append(done)
                print(f"{side}: indexer {done.indexer.seconds}", file=sys.stderr, flush=True)

    def median(side: str, part: str, kind: str) -> float:
        return statistics.median(getattr(done, part).seconds[kind] for done in taken[side])

    def ratio(part: str, kind: str) -> float:
        return median(SHARED, part, kind) / median(EACH, part, kind)

    return {
        "indexer_time_ratio": ratio("indexer", "cpu_seconds"),
        "indexer_wall_ratio": ratio("indexer", "seconds"),
        "step_time_ratio": ratio("whole", "cpu_seconds"),
        **{
            f"{part}_{kind}": {side: median(side, part, kind) for side in taken}
            for part in ("indexer", "whole")
            for kind in _CLOCKS
        },
        "selection_bytes": {side: steps[0].selection_bytes for side, steps in taken.items()},
        "selection_bytes_planned": planned_bytes(sizes),
        "computing_layers": {side: sum(place.computes for place in some) for side, some in places.items()},
    }
