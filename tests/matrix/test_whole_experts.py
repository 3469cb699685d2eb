"""Whole experts on tensor parallel ranks without expert parallelism: all copies get one gradient."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch

from tests.matrix import model as tiny
from tests.matrix import steps
from tests.support import model as job
from tests.support.model import assert_same_gradients, put_together
from tests.support.releases import FULL_HERE

pytestmark = pytest.mark.releases(">=0.12.1", quick=True)

WHOLE = {"tp": 2, "ep": 1, "etp": 1}
EXPERTS = ".mlp.experts."


def fill(model: torch.nn.Module) -> None:
    """Fill weights as ``tiny.fill_by_name``; experts get one process's weights on every rank."""
    experts = {id(each) for name, each in model.named_parameters() if EXPERTS in name}

    def shape(parameter: torch.nn.Parameter) -> list[int]:
        return list(parameter.shape) if id(parameter) in experts else full_shape(parameter)

    with mock.patch.object(job, "_full_shape", shape):
        fill_by_name(model)


full_shape = job._full_shape
fill_by_name = tiny.fill_by_name


def trained(**arguments: Any) -> dict[str, Any]:
    """Run :func:`steps.step` with whole experts on each rank; add the gradient norm."""
    train, norms = job.train_step, []

    def train_step(*args: Any) -> Any:
        distributed = import_module("megatron.core.distributed")
        wrap, wrapped = distributed.DistributedDataParallel, []

        def keep(*args: Any, **kwargs: Any) -> Any:
            wrapped.append(wrap(*args, **kwargs))
            return wrapped[-1]

        with mock.patch.object(distributed, "DistributedDataParallel", keep):
            losses = train(*args)
        norms.append(norm_of(wrapped))
        return losses

    with mock.patch.object(tiny, "fill_by_name", fill), mock.patch.object(job, "train_step", train_step):
        found = steps.step(**arguments)
    split = {name: None if EXPERTS in name else each for name, each in found["split"].items()}
    return {**found, "split": split, "norm": norms[0]}


def norm_of(chunks: list[Any]) -> float:
    """Return the norm that Megatron's optimizer would clip by."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), chunks)
    for parameter in chunks[0].parameters():
        parameter.grad = parameter.main_grad
    return float(optimizer.get_grad_norm())


@pytest.mark.parametrize(
    "grouped",
    [pytest.param({}, marks=FULL_HERE), {"moe_grouped_gemm": True}],
    ids=["one by one", "grouped"],
)
def test_copies_of_experts_learn_the_same(pool, grouped):
    step = {"num_microbatches": 2, "micro_batch_size": 2, "switches": grouped, "overrides": grouped}
    (alone,) = pool.baseline(f"{__name__}:trained", 1, **step)
    ranks = pool.run(f"{__name__}:trained", 2, **WHOLE, **step)
    assert sum(EXPERTS in name for name in alone["gradients"]) == (4 if grouped else 16)
    assert ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert_same_gradients(put_together(ranks), alone["gradients"])
    assert [rank["norm"] for rank in ranks] == pytest.approx([alone["norm"]] * 2, rel=1e-5)
