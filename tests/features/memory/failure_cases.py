"""What runs inside the pool's workers: steps that fail, what is refused then, and training after a load."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support import optimizer_job as jobs
from tests.support.optimizer_job import Job, build, drawn_gradients, state

step = partial(jobs.step, gradients=drawn_gradients)


class OutOfLuckError(Exception):
    """What the injected failures raise."""


@contextlib.contextmanager
def nth_call_fails(
    holder: Any, name: str, nth: int, counts: Callable[..., bool] = lambda *unused: True
) -> Iterator[None]:
    """Replace a function by one that raises in its ``nth`` call, of those that ``counts`` is true for."""
    original, calls = getattr(holder, name), []

    def unlucky(*args: Any, **kwargs: Any) -> Any:
        if counts(*args):
            calls.append(None)
            if len(calls) == nth:
                raise OutOfLuckError
        return original(*args, **kwargs)

    with mock.patch.object(holder, name, unlucky):
        yield


@contextlib.contextmanager
def _before_anything(part: Any) -> Iterator[None]:
    def unlucky(*unused: Any) -> None:
        raise OutOfLuckError

    handle = part.optimizer.register_step_pre_hook(unlucky)
    try:
        yield
    finally:
        handle.remove()


def _at_update(nth: int, part: Any) -> Any:
    """torch's Adam calls it once for each parameter, last."""
    return nth_call_fails(torch.Tensor, "addcdiv_", nth)


def _before_the_copy_back(part: Any) -> Any:
    return nth_call_fails(part, "_copy_main_params_to_model_params", 1)


@contextlib.contextmanager
def _in_the_copy_back(part: Any) -> Iterator[None]:
    """The second parameter's; with shared storages the first change of form."""
    from mindspeed_dsa.features.memory.reuse_fp32_param import shared_storage
    from mindspeed_dsa.megatron.optimizer import state_of

    def is_copy_back(destination: Tensor, source: Any, *unused: Any) -> bool:
        return destination.dtype is torch.bfloat16 and source.dtype is torch.float32

    if state_of(part, "reuse-fp32-param") is not None:
        with nth_call_fails(shared_storage, "split", 1):
            yield
    else:
        with nth_call_fails(torch.Tensor, "copy_", 2, is_copy_back):
            yield


POINTS: dict[str, Callable[[Any], Any]] = {
    "before anything": _before_anything,
    "in the first parameter": partial(_at_update, 1),
    "after the first parameter": partial(_at_update, 2),
    "in a later chunk": partial(_at_update, 15),
    "before the copy back": _before_the_copy_back,
    "in the copy back": _in_the_copy_back,
}


def after_failures(points: Sequence[str], **options: Any) -> dict[str, Any]:
    """For each point: a step, a step that fails there, what then follows, and a step from a loaded state.

    Returns:
        by point ``raised``; ``refused``, what a step and saving say; ``next``, what follows if nothing is
        refused; ``loaded``, what follows from the state before the failure, loaded; by ``none`` what follows
        without a failure.
    """
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as started:
        for point in ("none", *points):
            job = build(**options)
            started.enter_context(mock.patch.object(jobs, "start"))  # once in a process
            step(job, 0)
            found[point] = _outcome(job, point)
    return found


def _outcome(job: Job, point: str) -> dict[str, Any]:
    if point == "none":
        return {"record": step(job, 1), **state(job)}
    (part,) = job.parts
    kept = saved(job)
    raised = ""
    with POINTS[point](part):
        try:
            step(job, 1)
        except OutOfLuckError as error:
            raised = type(error).__name__
    found: dict[str, Any] = {"raised": raised}
    weights = jobs.digest(next(job.model.parameters()))
    saving = part.get_parameter_state_dp_zero if job.ddp.use_distributed_optimizer else part.state_dict
    before = part.optimizer.state_dict()["state"]
    found["refused"] = [text for text in (error_of(partial(step, job, 2)), error_of(saving)) if text]
    if found["refused"]:
        assert jobs.digest(next(job.model.parameters())) == weights, "a refused step has written weights"
        assert len(before) == len(part.optimizer.state_dict()["state"])
    else:
        found["next"] = {"record": step(job, 3), **state(job)}
    load(job, kept)
    found["loaded"] = {"record": step(job, 1), **state(job)}
    return found


def error_of(attempt: Callable[[], Any]) -> str:
    """What it says if it refuses."""
    try:
        attempt()
    except RuntimeError as error:
        return str(error)
    return ""


def spoiled(**options: Any) -> dict[str, Any]:
    """Weights, and what is refused, after changing to master form has failed."""
    from mindspeed_dsa.features.memory.reuse_fp32_param import shared_storage

    job = build(**options)
    step(job, 0)
    fails = nth_call_fails(shared_storage, "join", 1)
    with contextlib.suppress(OutOfLuckError), fails:
        step(job, 1)
    nan = [bool(parameter.isnan().all()) for parameter in job.model.parameters()]
    return {"weights are NaN": all(nan), "refused": error_of(partial(step, job, 2))}


def others_after_failure(**options: Any) -> dict[str, Any]:
    """With the distributed optimizer: the part of a bucket that master form of this rank lay over."""
    from mindspeed_dsa.megatron.optimizer import state_of

    job = build(**options)
    (part,) = job.parts
    step(job, 0)
    with contextlib.suppress(OutOfLuckError), _before_anything(part):
        step(job, 1)
    masters = state_of(part, "reuse-fp32-param").masters
    return {
        "own": any(bool(each.weights.isnan().any()) for each in masters.storages),
        "others": all(bool(each._others.isnan().all()) for each in masters.storages),
        "refused": error_of(partial(part.prepare_grads)),
    }


def saved(job: Job) -> dict[str, Any]:
    """Weights, state dict and, with the distributed optimizer, the state of parameters: all copies."""
    (part,) = job.parts
    parameters = part.get_parameter_state_dp_zero() if job.ddp.use_distributed_optimizer else None
    weights = [parameter.detach() for parameter in job.model.parameters()]
    return copy.deepcopy({"weights": weights, "optimizer": part.state_dict(), "parameters": parameters})


def load(job: Job, kept: Mapping[str, Any]) -> None:
    """The counterpart, the model first as Megatron does."""
    kept = copy.deepcopy(kept)
    with torch.no_grad():
        for parameter, weight in zip(job.model.parameters(), kept["weights"], strict=True):
            parameter.copy_(weight)
    (part,) = job.parts
    part.load_state_dict(kept["optimizer"])
    if kept["parameters"] is not None:
        part.load_parameter_state_from_dp_zero(kept["parameters"])


def state_dicts(loaded: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """State dicts, leaf by leaf and key by key in their order, at several moments of a training.

    Args:
        loaded: what :func:`saved` gave in another job; training goes on from it.
        options: of the job.
    """
    job = build(**options)
    (part,) = job.parts
    leaves: dict[str, Any] = {}

    def tell(moment: str) -> None:
        leaves[moment] = list(leaves_of(part.state_dict()))
        if job.ddp.use_distributed_optimizer and moment != "fresh":
            leaves[f"{moment}, parameters"] = list(leaves_of(part.get_parameter_state_dp_zero()))
            leaves[f"{moment}, inner"] = list(leaves_of(part.optimizer.state_dict(), sort=loaded is not None))

    tell("fresh")
    first = 0
    if loaded is not None:
        load(job, loaded)
        tell("loaded")
        first = 2
    records = [step(job, number) for number in (first, first + 1)]
    tell("between steps")
    drawn_gradients(job, first + 2)
    tell("before the update")
    kept = saved(job)
    return {"leaves": leaves, "records": records, "saved": kept, **state(job)}


def leaves_of(value: Any, path: str = "", sort: bool = False) -> Iterator[tuple[Any, ...]]:
    """Every leaf with its path, type and, for tensors, all that can be told of them."""
    if isinstance(value, dict):
        yield path, "keys", sorted(map(repr, value)) if sort else list(map(repr, value))
        for key in sorted(value, key=repr) if sort else value:
            yield from leaves_of(value[key], f"{path}/{key!r}", sort)
    elif isinstance(value, (list, tuple)):
        yield path, type(value).__name__, len(value)
        for place, item in enumerate(value):
            yield from leaves_of(item, f"{path}/{place}", sort)
    elif isinstance(value, Tensor):
        form = (str(value.dtype), str(value.device), tuple(value.shape), value.stride(), value.requires_grad)
        yield path, type(value).__name__, form, jobs.digest(value)
    else:
        yield path, type(value).__name__, repr(value)
