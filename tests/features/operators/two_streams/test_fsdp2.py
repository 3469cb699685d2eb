"""Sharded weights used by two streams are freed after both are done, and gradients are complete."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from mindspeed_dsa.megatron import second_stream
from tests.support import memory_events, optimizer_job
from tests.support.model import start
from tests.support.stream_order import OrderedStream, backward_by_streams, watched

CASES = "tests.features.operators.two_streams.test_fsdp2"
FSDP2 = {"use_torch_fsdp2": True}
ON = {"two_streams": True, "two_streams_min_tokens": 0}
UNITS = "sub_modules_to_wrap: [megatron.core.transformer.moe.shared_experts.SharedExpertMLP]"

# -- functions that run in the pool's workers ------------------------------------------------------


def trained(switches: dict[str, Any], pairs: bool = False, **overrides: Any) -> dict[str, Any]:
    """Take two steps with an optimizer; also return the number of starts on the second stream."""
    start({**FSDP2, **switches}, ep=2 if pairs else 1)
    with memory_events.counted() as counts:
        options: dict[str, Any] = {"precision": "bf16", "fsdp2": True, "ep": 2 if pairs else 1}
        job = optimizer_job.assemble(**options, overrides=overrides)
        records = [optimizer_job.step(job, number) for number in range(2)]
    return {"records": records, "starts": counts[memory_events.BESIDE]}


def watched_step(leaves_out: str = "") -> dict[str, list[str]]:
    """Return races in a step, and weights freed while the second stream may read them.

    Args:
        leaves_out: omitted synchronization: ``waits`` of the first stream, or weight gradient
            ``accumulators``.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    start({**FSDP2, **ON})
    job = optimizer_job.assemble(precision="fp32", fsdp2=True)
    free, wait, early = FSDPParam.free_unsharded_param, OrderedStream.wait_event, []

    def wait_on_second(self: Any, event: Any) -> None:
        if leaves_out != "waits" or self is not platform.host:
            wait(self, event)

    with watched(results=True) as platform, backward_by_streams(platform):

        def freed(self: Any) -> None:
            for tensor in self._unsharded_inner_tensors or self.all_gather_outputs:
                place = tensor.untyped_storage().data_ptr()
                before = len(platform.freed_early)
                platform._freed(place, platform.host, self._param_fqn)
                early.extend(platform.freed_early[before:])
            free(self)

        with (
            mock.patch.object(FSDPParam, "free_unsharded_param", freed),
            mock.patch.object(OrderedStream, "wait_event", wait_on_second),
            mock.patch.object(
                second_stream,
                "_accumulators",
                (lambda modules: []) if leaves_out == "accumulators" else second_stream._accumulators,
            ),
        ):
            optimizer_job.forward_backward(job, 0)
    return {"races": list(platform.races), "early": early}


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("prefetch", [2, 0])
def test_the_same_bits(pool, prefetch):
    one, two = (
        pool.run(f"{CASES}:trained", 2, switches={"fsdp2_prefetch": prefetch, **more}) for more in ({}, ON)
    )
    for before, after in zip(one, two, strict=True):
        assert after["records"] == before["records"]
        assert before["starts"] == 0 < after["starts"]


@pytest.mark.full
@pytest.mark.parametrize("sharded", [False, True])
def test_the_same_bits_in_pairs(pool, sharded):
    switches = {"moe_fb_overlap": True, "fsdp2_shard_experts": sharded}
    one, two = (
        pool.run(f"{CASES}:trained", 4, switches={**switches, **more}, pairs=True) for more in ({}, ON)
    )
    for before, after in zip(one, two, strict=True):
        assert after["records"] == before["records"]
        assert before["starts"] == 0 < after["starts"]


@pytest.mark.full
def test_a_unit_of_its_own_stays_on_the_first_stream(pool, tmp_path):
    (file := tmp_path / "fsdp2.yaml").write_text(UNITS)
    config = {"fsdp2_config_path": str(file)}
    alone, both = (pool.run(f"{CASES}:trained", 2, switches={**ON, **more}) for more in (config, {}))
    for with_unit, without in zip(alone, both, strict=True):
        assert 0 < with_unit["starts"] < without["starts"]


def test_both_streams_are_done_before_weights_and_gradients_go(pool):
    for found in pool.run(f"{CASES}:watched_step", 2):
        assert found == {"races": [], "early": []}


@pytest.mark.full
def test_what_is_left_out_is_missed(pool):
    for rank in pool.run(f"{CASES}:watched_step", 2, leaves_out="waits"):
        assert any("indexer" in name or "shared_experts" in name for name in rank["early"])
    for rank in pool.run(f"{CASES}:watched_step", 2, leaves_out="accumulators"):
        assert rank["races"], "a gradient is reduced before it is there"
