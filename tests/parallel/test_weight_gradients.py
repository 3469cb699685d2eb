"""Deferred gradients of one weight add up, even if some of them return None."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.data_parallel.fsdp2.pairs import Late
from mindspeed_dsa.parallel.weight_gradients import (
    DeferredGradient,
    QueuedGradient,
    are_queued,
    deferred_gradient_of,
    linear_later,
    queue_gradients,
    queued_as_now,
)
from tests.support.stream_order import watched

ORDERS = [(1.0, 2.0), (1.0, None, 2.0), (1.0, None), (None, 1.0), (None, None)]


def leave(deferred, values):
    for value in values:
        deferred.defer(lambda value=value: None if value is None else torch.full((3,), value))


def expected(values):
    given = [value for value in values if value is not None]
    return torch.full((3,), sum(given)) if given else None


def same(found, wanted):
    return found is wanted if found is None or wanted is None else torch.equal(found, wanted)


@pytest.mark.parametrize("values", ORDERS, ids=str)
def test_one_that_is_in_main_grad_already_drops_no_other(values):
    weight = torch.zeros(3, requires_grad=True)
    deferred = DeferredGradient(weight)
    leave(deferred, values)
    deferred.edge.backward(torch.empty(0))
    assert same(weight.grad, expected(values))


@pytest.mark.parametrize("queued", [False, True])
def test_what_runs_again_leaves_gradients_where_it_did(queued):
    """The rerun happens during a forward whose gradients go elsewhere, as in a pair."""
    weight, queue, others = torch.zeros(3, requires_grad=True), [], []
    with queue_gradients([weight], queue) if queued else contextlib.nullcontext():
        again = queued_as_now(lambda: deferred_gradient_of(weight))
    with queue_gradients([weight], others):
        result = again()
        assert deferred_gradient_of(weight).is_in(others)
        assert are_queued()
    assert result.is_in(queue) if queued else result is None
    assert not are_queued()


@pytest.mark.parametrize("values", ORDERS, ids=str)
@pytest.mark.parametrize("before", [None, 4.0])
def test_the_same_of_a_unit_whose_gradients_come_late(values, before):
    unit = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_groups=[]))
    late, weight = Late(unit), torch.zeros(3, requires_grad=True)
    weight.grad = None if before is None else torch.full((3,), before)
    leave(QueuedGradient(weight, late._queue), values)
    late.run()
    assert len(late) == 0
    assert same(weight.grad, expected((before, *values)))


def test_operands_of_a_second_stream_are_kept_until_the_gradient_is_computed():
    """The backward runs on the second stream, and the queued gradients run on the first one."""
    weights, queue = [torch.randn(6, 8, requires_grad=True), torch.randn(8, 6, requires_grad=True)], []
    with watched(results=True) as platform:
        second, done = platform.new_stream(), platform.new_event()
        with platform.use_stream(second), queue_gradients(weights, queue):
            hidden = torch.randn(4, 8, requires_grad=True) * 2
            for weight in weights:
                hidden = torch.relu(linear_later(hidden, None, deferred_gradient_of(weight), None))
            hidden.sum().backward()
            done.record()
        del hidden
        platform.current_stream().wait_event(done)
        while queue:
            queue.pop(0).gradient()
    assert platform.freed_early == []
    assert platform.races == []
