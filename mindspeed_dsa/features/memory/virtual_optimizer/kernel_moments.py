"""Moments in memory that only kernels reach: NPUs' swapped memory.

torch_npu documents this memory for ``fill_``, ``zero_`` and its own AdamW operator, so that operator updates
the parameters whose moments lie there. For the duration of a call, other code finds copies of the moments in
the optimizer's state, which are made, and written back, element by element.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.features.memory.host_moments import MOMENTS, Moments, is_torch_adam
from mindspeed_dsa.parallel.local_shards import local_of


def check_adamw(optimizer: Any) -> Iterator[str]:
    """A problem where the operator does not compute what the inner optimizer would."""
    if not is_torch_adam(optimizer) or any(
        group["weight_decay"] and not _is_decoupled(optimizer, group) for group in optimizer.param_groups
    ):
        yield (
            "on NPUs only torch_npu's AdamW operator updates moments in swapped memory, and this optimizer "
            "is another one; use decoupled weight decay without Apex, or omit --virtual-optimizer"
        )


def _is_decoupled(optimizer: Any, group: Mapping[str, Any]) -> bool:
    # AdamW's groups have no such key where it is not a subclass of Adam.
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


@contextlib.contextmanager
def copied(
    optimizer: Any, moments: Moments, parameters: Sequence[Tensor] | None = None, write_back: bool = False
) -> Iterator[None]:
    """Copies of the moments in the optimizer's state.

    Args:
        optimizer: the inner one.
        moments: its moments.
        parameters: whose; by default all.
        write_back: whether the copies are changed.
    """
    platform = platforms.current()
    chosen = moments.places if parameters is None else parameters
    own = {each: optimizer.state[each] for each in chosen if each in moments.places}
    for parameter, state in own.items():
        # A state of its own, which a state dict may keep.
        optimizer.state[parameter] = {
            key: platform.read_mapped(value) if key in MOMENTS else value for key, value in state.items()
        }
    try:
        yield
    finally:
        for parameter, state in own.items():
            if write_back:
                for key in MOMENTS:
                    platform.write_mapped(state[key], optimizer.state[parameter][key])
            optimizer.state[parameter] = state


@torch.no_grad()
def step(optimizer: Any, moments: Moments, rest: Callable[[], Any]) -> None:
    """One step: the operator for parameters whose moments lie in such memory, ``rest`` for the others."""
    hidden: dict[Tensor, Tensor] = {}
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in moments.places:
                    apply_adamw(parameter, moments.begin(parameter, group), group)
                    hidden[parameter], parameter.grad = parameter.grad, None
        rest()
    finally:
        for parameter, gradient in hidden.items():
            parameter.grad = gradient


def apply_adamw(parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """torch_npu's operator: AdamW in place on the parameter and its two moments.

    Args:
        parameter: with its gradient, of the same type.
        state: ``step``, which is counted up, and the moments.
        group: rates, as in torch's Adam.
    """
    import torch_npu

    (beta1, beta2), before = group["betas"], float(state["step"])
    state["step"] += 1
    torch_npu.npu_apply_adam_w(
        beta1**before,
        beta2**before,
        float(group["lr"]),
        group["weight_decay"],
        beta1,
        beta2,
        group["eps"],
        local_of(cast(Tensor, parameter.grad)),
        None,
        False,
        bool(group["maximize"]),
        out=(local_of(parameter).data, *(state[key] for key in MOMENTS)),
    )
