"""Row counts per expert skip the dispatcher's host copies when only the device reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_dsa.features.moe.grouped_experts import counts


class Experts:
    """Experts whose products read the row counts on the device, or on the host."""

    def __init__(self, reads: bool = False) -> None:
        self.reads = reads

    def reads_counts(self) -> bool:
        return self.reads


class Dispatcher:
    """Dispatcher like Megatron's: it counts, later copies tensors to the host, and says when it waits."""

    cuda_dtoh_point = "before_permutation_1"
    cuda_sync_point = "before_finish"
    device = "meta"

    @counts.keep_counts
    def preprocess(self, routing_map: torch.Tensor) -> Any:
        return torch.empty(routing_map.size(1), dtype=torch.int64, device=self.device)

    @counts.give_counts
    def dispatch_postprocess(self, rows: torch.Tensor, probs: torch.Tensor) -> Any:
        return rows, self.tokens_per_expert, probs

    tokens_per_expert: Any = None


def told(experts: Any) -> Dispatcher:
    """Return the dispatcher of a layer with these experts."""

    def build(self: Any) -> None:
        self.experts, self.token_dispatcher = experts, Dispatcher()

    layer = SimpleNamespace()
    counts.know_experts(build)(layer)
    dispatcher: Dispatcher = layer.token_dispatcher
    return dispatcher


def passed(dispatcher: Dispatcher) -> Any:
    """Return the counts that the experts receive."""
    dispatcher.tokens_per_expert = dispatcher.preprocess(torch.empty(6, 4))
    rows, counts_received, probs = dispatcher.dispatch_postprocess("rows", "probs")
    assert (rows, probs) == ("rows", "probs")
    return counts_received


def test_numbers_stay_on_the_device():
    dispatcher = told(Experts())
    for _ in range(2):
        counts_received = passed(dispatcher)
        assert dispatcher.tokens_per_expert is None, "there was something to copy"
        assert counts_received.shape == (4,)
        assert counts_received.device.type == "meta"
        assert dispatcher.cuda_sync_point == "no_sync"
        assert not [each for each in vars(dispatcher).values() if isinstance(each, torch.Tensor)]
        dispatcher.cuda_sync_point = "before_finish"


def test_split_sizes_are_waited_for():
    dispatcher = told(Experts())
    dispatcher.cuda_sync_point = "before_ep_alltoall"
    assert passed(dispatcher).device.type == "meta"
    assert dispatcher.cuda_sync_point == "before_ep_alltoall"


@pytest.mark.parametrize(
    ("experts", "attributes"),
    [
        (Experts(reads=True), {}),
        (Experts(), {"device": "cpu"}),
        (Experts(), {"cuda_dtoh_point": "before_ep_alltoall"}),
        (object(), {}),
    ],
    ids=["read on the host", "counted on a CPU", "in a CUDA graph", "experts of another kind"],
)
def test_all_else_is_megatrons(experts, attributes):
    dispatcher = told(experts)
    vars(dispatcher).update(attributes)
    given = passed(dispatcher)
    assert given is dispatcher.tokens_per_expert
    assert given.shape == (4,)
    assert dispatcher.cuda_sync_point == "before_finish"
