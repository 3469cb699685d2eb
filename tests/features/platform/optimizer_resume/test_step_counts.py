"""The distributed optimizer on torch's Adam resumes as if it had never stopped."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

import mindspeed_dsa
from mindspeed_dsa.features.platform.without_apex import feature
from tests.support import third_party

# -- functions that run in the pool's workers ------------------------------------------------------


def train_and_resume(layout: str, platform: str = "cpu") -> dict[str, list[torch.Tensor]]:
    """Take four steps with the distributed optimizer; repeat the last two with a new one from saved state.

    Args:
        layout: Megatron's format of the moments, ``dp_zero`` or ``dp_reshardable``.
        platform: platform of the job; NPU tests call this function, too.

    Returns:
        weights at the end, ``unbroken`` and ``resumed``, and ``steps`` counted per parameter.
    """
    from megatron.core import parallel_state

    with mindspeed_dsa.enabled(mindspeed_platform=platform):
        parallel_state.initialize_model_parallel()
        try:
            model, optimizer = _build()
            _steps(model, optimizer, range(2))
            weights = copy.deepcopy(model.module.state_dict())
            common = copy.deepcopy(optimizer.state_dict())
            moments = _cloned(getattr(optimizer, f"get_parameter_state_{layout}")())
            _steps(model, optimizer, range(2, 4))
            unbroken = [parameter.detach().clone() for parameter in model.parameters()]

            model, optimizer = _build()
            fresh = optimizer.state_dict()  # Megatron calls it before it reads a checkpoint
            assert {group["step"] for group in fresh["optimizer"]["param_groups"]} == {0.0}
            if layout == "dp_reshardable":
                _as_read(moments)
            model.module.load_state_dict(weights)
            optimizer.load_state_dict(common)
            getattr(optimizer, f"load_parameter_state_from_{layout}")(moments)
            _steps(model, optimizer, range(2, 4))
            return {
                "unbroken": unbroken,
                "resumed": [parameter.detach().clone() for parameter in model.parameters()],
                "steps": [state["step"] for state in optimizer.optimizer.state.values()],
            }
        finally:
            parallel_state.destroy_model_parallel()


def _build() -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from tests.features.platform.p2p_ordering import pipeline_cases

    (part,) = pipeline_cases._build(1, None, False)
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(part.config, sharded, part)
    config = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True)
    (optimizer,) = get_megatron_optimizer(config, [model]).chained_optimizers
    return model, optimizer


def _steps(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, 64, (2, 17), generator=generator).cuda()
        positions = torch.arange(16).cuda().expand(2, -1)
        model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
        model.finish_grad_sync()
        done, _, _ = optimizer.step()
        assert done


def _cloned(state: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), state)


def _as_read(moments: dict[Any, Any]) -> None:
    """Change moments as a checkpoint of this format would: it stores no steps, so the reader's own stay."""
    buffers = [buckets for buffer, buckets in moments.items() if isinstance(buffer, int)]
    for bucket in (bucket for buckets in buffers for lists in buckets.values() for bucket in lists):
        for shard in bucket:
            shard.update(padding=False, step=torch.zeros(()))


@pytest.mark.parametrize(
    ("platform", "installed", "on"),
    [
        ("npu", "", True),
        ("cpu", "", True),
        ("cuda", "", True),
        ("cuda", "transformer_engine", False),
        ("cuda", "apex", False),
    ],
)
def test_the_repairs_are_on_where_adam_is_torchs(monkeypatch, platform, installed, on):
    """On a GPU, a resumed job with a memory feature silently began with step 0."""
    monkeypatch.setattr(feature, "find_spec", lambda name: object() if name == installed else None)
    rows = feature.needed_rows(SimpleNamespace(platform=platform, transformer_impl=None))
    assert (feature.RESUME_ROWS[0] in rows) is on


third_party.or_skip("megatron.core")

CASES = "tests.features.platform.optimizer_resume.test_step_counts"


@pytest.mark.parametrize("layout", [pytest.param("dp_zero", marks=pytest.mark.full), "dp_reshardable"])
def test_a_resumed_run_equals_an_unbroken_one(pool, layout):
    ranks = pool.run(f"{CASES}:train_and_resume", 2, layout=layout)
    for rank in ranks:
        assert {step.item() for step in rank["steps"]} == {4.0}
        assert any(not torch.equal(weight, torch.zeros_like(weight)) for weight in rank["unbroken"])
        assert all(map(torch.equal, rank["unbroken"], rank["resumed"]))
