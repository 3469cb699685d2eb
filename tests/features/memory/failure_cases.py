"""Worker functions: steps that fail, operations refused afterwards, and training from a loaded state."""

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
    """Error raised by injected failures."""


@contextlib.contextmanager
def nth_call_fails(
    holder: Any, name: str, nth: int, counts: Callable[..., bool] = lambda *unused: True
) -> Iterator[None]:
    """Make the ``nth`` call of a function raise; only calls for which ``counts`` is true count."""
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

    # Raises before torch's optimizer has read or written anything.
    handle = part.optimizer.register_step_pre_hook(unlucky)
    try:
        yield
    finally:
        handle.remove()


def _at_update(nth: int, part: Any) -> Any:
    # torch's Adam calls addcdiv_ once per parameter, as its last operation.
    return nth_call_fails(torch.Tensor, "addcdiv_", nth)


def _before_the_copy_back(part: Any) -> Any:
    return nth_call_fails(part, "_copy_main_params_to_model_params", 1)


@contextlib.contextmanager
def _in_the_copy_back(part: Any) -> Iterator[None]:
    """Fail in the second parameter's copy back, or in the first conversion of shared storages."""
    from mindspeed_dsa.features.memory.reuse_fp32_param import shared_storage
    from mindspeed_dsa.megatron.optimizer import state_of

    def is_copy_back(destination: Tensor, source: Any, *unused: Any) -> bool:
        return destination.dtype is torch.bfloat16 and source.dtype is torch.float32

    # With shared storages, the copy back is a conversion from master to pair form.
    if state_of(part, "reuse-fp32-param") is not None:
        with nth_call_fails(shared_storage, "split", 1):
            yield
    else:
        with nth_call_fails(torch.Tensor, "copy_", 2, is_copy_back):
            yield


# Places in a step at which it can fail, in the order of the step.
POINTS: dict[str, Callable[[Any], Any]] = {
    "before anything": _before_anything,
    "in the first parameter": partial(_at_update, 1),
    "after the first parameter": partial(_at_update, 2),
    "in a later chunk": partial(_at_update, 15),
    "before the copy back": _before_the_copy_back,
    "in the copy back": _in_the_copy_back,
}


def after_failures(points: Sequence[str], **options: Any) -> dict[str, Any]:
    """Take a step, a step that fails, and follow-up steps, for each point of failure.

    Returns:
        dict from point to ``raised`` (error), ``refused`` (messages of a step and of saving), ``next``
        (result after the failure if nothing is refused) and ``loaded`` (result from the loaded earlier
        state). ``none`` has the result without a failure.
    """
    outcomes: dict[str, Any] = {}
    with contextlib.ExitStack() as started:
        for point in ("none", *points):
            job = build(**options)
            started.enter_context(mock.patch.object(jobs, "start"))  # once in a process
            step(job, 0)
            outcomes[point] = _outcome(job, point)
    return outcomes


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
    result: dict[str, Any] = {"raised": raised}
    weights = jobs.digest(next(job.model.parameters()))
    saving = part.get_parameter_state_dp_zero if job.ddp.use_distributed_optimizer else part.state_dict
    # Saving must not change the inner optimizer's state either.
    before = part.optimizer.state_dict()["state"]
    result["refused"] = [text for text in (error_of(partial(step, job, 2)), error_of(saving)) if text]
    if result["refused"]:
        assert jobs.digest(next(job.model.parameters())) == weights, "a refused step has written weights"
        assert len(before) == len(part.optimizer.state_dict()["state"])
    else:
        result["next"] = {"record": step(job, 3), **state(job)}
    # Loading a state is the way out of a refusal.
    load(job, kept)
    result["loaded"] = {"record": step(job, 1), **state(job)}
    return result


def error_of(attempt: Callable[[], Any]) -> str:
    """Return the RuntimeError's message, or an empty string."""
    try:
        attempt()
    except RuntimeError as error:
        return str(error)
    return ""


def spoiled(**options: Any) -> dict[str, Any]:
    """Return the weights' state and the refusal after a conversion to master form has failed."""
    from mindspeed_dsa.features.memory.reuse_fp32_param import shared_storage

    job = build(**options)
    step(job, 0)
    # `join` makes the master form, so a failure leaves neither form complete.
    fails = nth_call_fails(shared_storage, "join", 1)
    with contextlib.suppress(OutOfLuckError), fails:
        step(job, 1)
    nan = [bool(parameter.isnan().all()) for parameter in job.model.parameters()]
    return {"weights are NaN": all(nan), "refused": error_of(partial(step, job, 2))}


def others_after_failure(**options: Any) -> dict[str, Any]:
    """Return the state of a distributed optimizer's bucket that the master form of this rank overlaid."""
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
    """Return copies of weights, state dict and, with the distributed optimizer, the parameter state."""
    (part,) = job.parts
    parameters = part.get_parameter_state_dp_zero() if job.ddp.use_distributed_optimizer else None
    weights = [parameter.detach() for parameter in job.model.parameters()]
    return copy.deepcopy({"weights": weights, "optimizer": part.state_dict(), "parameters": parameters})


def load(job: Job, kept: Mapping[str, Any]) -> None:
    """Load a :func:`saved` state, the model first as Megatron does."""
    kept = copy.deepcopy(kept)
    with torch.no_grad():
        for parameter, weight in zip(job.model.parameters(), kept["weights"], strict=True):
            parameter.copy_(weight)
    (part,) = job.parts
    part.load_state_dict(kept["optimizer"])
    if kept["parameters"] is not None:
        part.load_parameter_state_from_dp_zero(kept["parameters"])


def state_dicts(loaded: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return the leaves of state dicts at several moments of a training, in key order.

    Args:
        loaded: result of :func:`saved` in another job, from which training resumes.
        options: options of the job.
    """
    job = build(**options)
    (part,) = job.parts
    leaves: dict[str, Any] = {}

    def tell(moment: str) -> None:
        leaves[moment] = list(leaves_of(part.state_dict()))
        # A fresh optimizer has no parameter state to read.
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
    """Yield every leaf with its path and type; for tensors also dtype, device, shape, strides and digest."""
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
