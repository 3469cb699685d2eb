"""Steps over chunks of host state, without Megatron: synchronization, and state after failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_dsa.features.memory.swap_optimizer.feature import Options
from mindspeed_dsa.features.memory.swap_optimizer.state_on_host import (
    EarlyGather,
    SwappedState,
    unless_gathered,
)
from mindspeed_dsa.optimizers import step_pipeline
from mindspeed_dsa.optimizers.integrity import StepIntegrity
from mindspeed_dsa.optimizers.moments import Moments
from mindspeed_dsa.optimizers.step_pipeline import Parameter, Pipeline, Slab
from tests.support.contexts import context
from tests.support.stream_order import OrderedPlatform, watched

SIZES = (300, 700, 24)
RATES = {"lr": 0.1, "weight_decay": 0.1}
CHUNKS = 5


class Group:
    """Bucket group that gathers one parameter's weights."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self.gathered = torch.empty_like(weights)

    def start_param_sync(self) -> None:
        self.gathered.copy_(self.weights)


@dataclass
class Swapped:
    """Optimizer of three parameters in five chunks, and a model's bf16 weights."""

    weights: list[Tensor]
    mains: list[Tensor]
    masters: list[Tensor]
    optimizer: Any
    pipeline: Pipeline
    gather: EarlyGather
    groups: list[Group] = field(default_factory=list)

    def gradients(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for main in self.mains:
            main.grad = torch.randn(main.shape, generator=generator)

    def step(self, number: int) -> None:
        self.gradients(number)
        with self.gather.during_a_step() as updated:
            self.pipeline.step(self.optimizer.step, updated)

    def read(self) -> list[Tensor]:
        """Return all tensors as the host reads them."""
        self.pipeline.settle()
        moments = [each for places in self.pipeline._moments.places.values() for each in places.values()]
        gathered = [group.gathered for group in self.groups]
        return [each.clone() for each in (*self.weights, *self.masters, *moments, *gathered)]

    @torch.no_grad()
    def set_masters(self, value: float) -> None:
        """Set the master weights from the host; the caller has to synchronize first."""
        for master in self.masters:
            master.fill_(value)


def build(monkeypatch: pytest.MonkeyPatch) -> Swapped:
    # Columns per chunk, rounded up: 1088 / 5 = 218.
    monkeypatch.setattr(
        step_pipeline, "columns_of", lambda slabs, *unused: -(-slabs[0].rows.size(1) // CHUNKS)
    )
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator).bfloat16() for size in SIZES]
    # Expanded from one element, so that the optimizer's own parameters take no memory.
    mains = [torch.zeros(1).expand(size) for size in SIZES]
    optimizer = torch.optim.AdamW(mains, **RATES, foreach=False)
    parameters = [
        Parameter(main, 0, partial(weights.__getitem__, place), place) for place, main in enumerate(mains)
    ]
    slab = Slab(parameters)
    rows = [slab.of(parameter) for parameter in parameters]
    moments = Moments(optimizer, {main: row[1:] for main, row in zip(mains, rows, strict=True)})
    pipeline = Pipeline(optimizer, [slab], moments, 1, StepIntegrity("swap-optimizer"))
    groups = [Group(weight) for weight in weights]
    made = Swapped(
        weights,
        mains,
        [row[0] for row in rows],
        optimizer,
        pipeline,
        EarlyGather(groups, pipeline.chunks),
        groups,
    )
    for master, weight in zip(made.masters, weights, strict=True):
        master.copy_(weight)
    # More chunks than buffers, so that buffers are reused within a step.
    assert len(pipeline.chunks) == CHUNKS > step_pipeline.BUFFERS
    return made


@pytest.fixture
def platform() -> Iterator[OrderedPlatform]:
    with watched() as found:
        yield found


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(one.equal(other) for one, other in zip(first, second, strict=True))


def plain(steps: int) -> list[Tensor]:
    """Return the master weights after steps of the plain optimizer."""
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(size, generator=generator).bfloat16().float() for size in SIZES]
    optimizer = torch.optim.AdamW(masters, **RATES, foreach=False)
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        for master in masters:
            master.grad = torch.randn(master.shape, generator=generator)
        optimizer.step()
    return masters


def everything(made: Swapped) -> None:
    """Take steps with a used and a dropped prefetch, and with reads and writes from the host."""
    made.step(0)
    made.pipeline.prefetch()
    made.step(1)  # immediately after the previous step
    made.pipeline.prefetch()
    made.pipeline.discard()
    made.pipeline.prefetch()
    made.step(2)
    made.read()


def test_everything_waits_for_what_it_needs(platform, monkeypatch):
    made = build(monkeypatch)
    everything(made)
    assert same(made.masters, plain(3))
    assert all(group.gathered.equal(weight) for group, weight in zip(made.groups, made.weights, strict=True))
    made.pipeline.prefetch()
    made.pipeline.discard()
    made.set_masters(1.0)
    made.pipeline.prefetch()
    made.pipeline.discard()
    assert platform.races == []
    lasting = [made.masters[0], *made.weights, *(group.gathered for group in made.groups)]
    addresses = {each.untyped_storage().data_ptr() for each in lasting}
    assert {address for address, _ in platform.used} <= addresses, "staging buffers outlast their copies"


@pytest.mark.parametrize("number", [1, 3], ids=["first", "third"])
@pytest.mark.parametrize(
    ("module", "name"), [(step_pipeline, "_copy"), (torch, "empty")], ids=["copy", "allocation"]
)
def test_a_load_that_fails_leaves_nothing_loaded(platform, monkeypatch, module, name, number):
    made = build(monkeypatch)
    made.step(0)
    calls = []
    original = getattr(module, name)

    def fails_once(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == number:
            raise ZeroDivisionError
        return original(*arguments, **options)

    with monkeypatch.context() as patches:
        patches.setattr(module, name, fails_once)
        with pytest.raises(ZeroDivisionError):
            made.pipeline.prefetch()
    assert len(calls) == number
    assert made.pipeline.staging == 0
    made.step(1)
    made.pipeline.settle()
    assert same(made.masters, plain(2))
    assert platform.races == []


@pytest.mark.parametrize("chunk", [2, CHUNKS])
def test_after_a_step_that_fails_in_the_middle_no_other_follows(platform, monkeypatch, chunk):
    made = build(monkeypatch)
    made.step(0)
    fail_in_chunk(made, chunk)
    assert made.pipeline.integrity.broken
    made.pipeline.prefetch()
    for refused in (partial(made.step, 1), made.pipeline.integrity.require):
        with pytest.raises(RuntimeError, match=r"those of no step.*load a state dict"):
            refused()


def test_a_step_that_fails_at_its_first_chunk_can_be_made_again(platform, monkeypatch):
    made = build(monkeypatch)
    made.step(0)
    fail_in_chunk(made, 1)
    made.step(1)
    made.pipeline.settle()
    assert same(made.masters, plain(2))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_without_a_part_gathers_in_the_order_of_the_others(platform, overlap):
    # Other ranks gather the optimizer's groups during its step, and all remaining groups after it.
    order: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name, self.buckets = name, [object()]

        @unless_gathered
        def start_param_sync(self) -> None:
            order.append(self.name)

    dense, experts = [Named("dense 0")], [Named("expert 0"), Named("expert 1")]
    # An optimizer whose groups are empty on this rank.
    optimizer = SimpleNamespace(
        **{name: [[]] for name in ("model_float16_groups", "shard_fp32_from_float16_groups")},
        **{name: [[]] for name in ("model_fp32_groups", "shard_fp32_groups")},
        optimizer=SimpleNamespace(param_groups=[{"params": []}]),
        ddp_config=SimpleNamespace(overlap_param_gather=overlap),
        is_stub_optimizer=False,
        model_chunks=[SimpleNamespace(bucket_groups=dense, expert_parallel_bucket_groups=experts)],
        buffers=[SimpleNamespace(buckets=[bucket for group in experts for bucket in group.buckets])],
    )
    having = context("swap-optimizer", Options(switched_on=True, times=None))
    init = SwappedState.wrap_built(lambda self, optimizer, config: None, having)
    init(optimizer, optimizer.optimizer, SimpleNamespace())
    SwappedState.wrap_step(lambda self: order.append("step") or True, having)(optimizer)
    for group in (*dense, *experts):
        group.start_param_sync()
    early, late = ["expert 0", "expert 1"], ["dense 0"]
    assert [name for name in order if name != "step"] == (late + early if overlap else early + late)


def fail_in_chunk(made: Swapped, chunk: int) -> None:
    """Take a step whose update raises in ``chunk``, counted from 1."""
    updates = iter(range(1, CHUNKS + 1))

    def update() -> None:
        if next(updates) == chunk:
            raise ZeroDivisionError
        made.optimizer.step()

    made.gradients(1)
    with pytest.raises(ZeroDivisionError):
        made.pipeline.step(update)
    assert made.pipeline.staging == 0
