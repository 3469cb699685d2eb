"""Helpers to recompute part of a forward in backward, as Megatron's checkpoint does.

Megatron's checkpoint saves a function's inputs and random states, and calls the function again when its
gradient arrives. Code that recomputes only parts of a layer, or earlier, must restore the same states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from mindspeed_dsa.feature import Megatron


@runtime_checkable
class RunsAgain(Protocol):
    """Interface of a paired layer that backward recomputes in two parts, each once.

    Attributes:
        runs_again: whether backward recomputes this layer.
    """

    runs_again: bool

    def recompute_before(self) -> None:
        """Recompute the part before the experts, and repeat its dispatch."""

    def recompute_experts(self) -> None:
        """Recompute the experts."""


RandomStates = Any
"""Random states of the CPU, of the device, and of Megatron's tracker of named states."""


def random_states(megatron: Megatron) -> RandomStates:
    """Return the current random number generator states."""
    return megatron("core.tensor_parallel.random")._get_all_rng_states()


def set_random_states(megatron: Megatron, states: RandomStates) -> None:
    """Restore random number generator states returned by :func:`random_states`."""
    megatron("core.tensor_parallel.random")._set_all_rng_states(*states)


@contextlib.contextmanager
def as_in_forward(megatron: Megatron, states: RandomStates) -> Iterator[None]:
    """Context with gradients enabled and the random states of an earlier forward; restores them on exit.

    Args:
        megatron: the session's accessor of Megatron's modules.
        states: result of :func:`random_states` before that forward.
    """
    random = megatron("core.tensor_parallel.random")
    with random._fork_rng(), checkpointing(megatron), torch.enable_grad():
        set_random_states(megatron, states)
        yield


@contextlib.contextmanager
def checkpointing(megatron: Megatron) -> Iterator[None]:
    """Context that sets Megatron's flag for checkpointed functions, which releases before 0.16 lack."""
    random = megatron("core.tensor_parallel.random")
    getattr(random, "_set_checkpointing", lambda: None)()
    try:
        yield
    finally:
        getattr(random, "_unset_checkpointing", lambda: None)()
