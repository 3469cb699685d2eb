"""A part of a forward, run again in backward with its graph, as Megatron's checkpoint runs it.

Megatron's checkpoint keeps inputs and random states of a function, and calls it a second time when its
gradient is there. What is recomputed in parts, or before that, needs the same surroundings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from mindspeed_dsa.feature import Megatron


@runtime_checkable
class RunsAgain(Protocol):
    """Layer of one forward that a schedule of pairs recomputes, in two parts and each once."""

    runs_again: bool

    def recompute_before(self) -> None:
        """Recompute what is before the experts; their tokens are on their way then."""

    def recompute_experts(self) -> None:
        """Recompute the rest."""


RandomStates = Any
"""States of the CPU, of the device, and of Megatron's tracker of named states."""


def random_states(megatron: Megatron) -> RandomStates:
    """Return the states that the next random numbers come from."""
    return megatron("core.tensor_parallel.random")._get_all_rng_states()


def set_random_states(megatron: Megatron, states: RandomStates) -> None:
    """Have the next random numbers come from states that :func:`random_states` returned."""
    megatron("core.tensor_parallel.random")._set_all_rng_states(*states)


@contextlib.contextmanager
def as_in_forward(megatron: Megatron, states: RandomStates) -> Iterator[None]:
    """Run the block with a graph and the random numbers of a forward; afterwards they are what they were.

    Args:
        megatron: of the session.
        states: what :func:`random_states` returned before that forward.
    """
    random = megatron("core.tensor_parallel.random")
    with random._fork_rng(), checkpointing(megatron), torch.enable_grad():
        set_random_states(megatron, states)
        yield


@contextlib.contextmanager
def checkpointing(megatron: Megatron) -> Iterator[None]:
    """Set Megatron's mark that a checkpointed function is running, where the release has one (from 0.16)."""
    random = megatron("core.tensor_parallel.random")
    getattr(random, "_set_checkpointing", lambda: None)()
    try:
        yield
    finally:
        getattr(random, "_unset_checkpointing", lambda: None)()
