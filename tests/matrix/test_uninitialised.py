"""Models without weight initialization: shard marks, the gradient norm, indexers missing from files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.matrix import model as tiny
from tests.matrix import steps
from tests.support import model as job

pytestmark = pytest.mark.releases(">=0.12.1", quick=True)


def norm(**overrides: Any) -> dict[str, Any]:
    """Return parameters' shard marks on two tensor parallel ranks, and a step's gradient norm."""
    with steps.job_of_any_release(1, 0):
        job.start(tp=2)
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        cfg = tiny.config(tensor_model_parallel_size=2, sequence_parallel=True, **overrides)
        model = tiny.gpt_model(cfg)
        wrapped = DistributedDataParallel(cfg, DistributedDataParallelConfig(), model)
        job.per_token_loss(wrapped, job.samples(2)).mean().backward()
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [wrapped])
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        return {"split": job.split_dimensions([model]), "norm": float(optimizer.get_grad_norm())}


def test_the_norm_has_every_ranks_part(pool):
    usual = pool.run(f"{__name__}:norm", 2)
    ours = pool.run(f"{__name__}:norm", 2, perform_initialization=False)
    assert ours == usual
    assert sum(dimension is not None for dimension in usual[0]["split"].values()) > 10


def indexers(**overrides: Any) -> dict[str, torch.Tensor]:
    """Return a model's indexer weights when uninitialized memory is full of one value."""
    empty = torch.empty

    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(1e4) if made.is_floating_point() else made

    with steps.job_of_any_release(1, 0), pytest.MonkeyPatch.context() as patch:
        job.start(tp=overrides.get("tensor_model_parallel_size", 1))
        patch.setattr(torch, "empty", full)
        patch.setattr(tiny, "fill_by_name", lambda model: None)
        model = tiny.gpt_model(tiny.config(perform_initialization=False, **overrides))
        found = {name: each.detach().clone() for name, each in model.named_parameters()}
        assert any(bool((each == 1e4).any()) for each in found.values())
        return {name: each for name, each in found.items() if ".indexer." in name}


def test_indexers_are_drawn_in_any_case(pool):
    first, second = pool.run(f"{__name__}:indexers", 2, tensor_model_parallel_size=2, sequence_parallel=True)
    assert len(first) == 2 * 5
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), f"{name} differs between tensor parallel ranks"
        assert weight.abs().max() < 10, name
        if "linear" in name:
            assert weight.std() == pytest.approx(0.02, rel=0.3), name
