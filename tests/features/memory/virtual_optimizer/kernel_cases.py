"""Worker functions: training on a platform whose mapped memory only kernels can access, as on NPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_dsa.features.memory.virtual_optimizer import mapped_moments
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.platforms import host_pool
from mindspeed_dsa.platforms.cpu import CpuPlatform
from mindspeed_dsa.platforms.npu import NpuPlatform
from tests.features.memory import failure_cases
from tests.support import optimizer_job as job

# Kernels named in torch_npu's manual. A view would suffice for them, but AdamW would copy it to the device
# and back.
KERNELS = {"fill_", "zero_", "mul_", "detach"}


class _KernelsOnly(TorchDispatchMode):
    """Dispatch mode that raises if another operation touches the pool's memory or a view of it."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [
            each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)
        ]
        name = function.overloadpacket.__name__
        if name not in KERNELS and any(map(host_pool.shared.holds, tensors)):
            raise RuntimeError(f"{name} does not reach swapped memory")
        return function(*args, **(kwargs or {}))


def _adamw(parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """AdamW in torch's arithmetic instead of the operator's, so that bits can be compared."""
    (beta1, beta2), rates = group["betas"], {key: group[key] for key in ("lr", "weight_decay", "eps")}
    moments = [[state[key]] for key in ("exp_avg", "exp_avg_sq")]
    with mock.patch.object(_KernelsOnly, "__torch_dispatch__", _through):
        adam(
            [local_of(parameter).detach()],
            [local_of(parameter.grad)],
            *moments,
            [],
            [state["step"]],
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            maximize=False,
            decoupled_weight_decay=True,
            **rates,
        )
    _calls.append(parameter.numel())


def _empty_mapped(self: CpuPlatform, size: Any, dtype: Any, owner: object) -> Tensor:
    with mock.patch.object(_KernelsOnly, "__torch_dispatch__", _through):
        return _of_pool(self, size, dtype, owner)


def _digest(tensor: Tensor) -> Any:
    with mock.patch.object(_KernelsOnly, "__torch_dispatch__", _through):
        return _digest_of_job(tensor)


_of_pool, _digest_of_job = CpuPlatform.empty_mapped, job.digest


def _through(self: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return function(*args, **(kwargs or {}))


_calls: list[int] = []


@contextmanager
def _kernels_only() -> Iterator[None]:
    _calls.clear()
    with (
        mock.patch.object(CpuPlatform, "mapped_by_kernels_only", True),
        mock.patch.object(CpuPlatform, "empty_mapped", _empty_mapped),
        mock.patch.object(CpuPlatform, "read_mapped", NpuPlatform.read_mapped),
        mock.patch.object(CpuPlatform, "write_mapped", NpuPlatform.write_mapped),
        mock.patch.object(mapped_moments, "apply_adamw", _adamw),
        mock.patch.object(job, "digest", _digest),  # the test itself reads the memory
        _KernelsOnly(),
    ):
        yield


def train(**options: Any) -> dict[str, Any]:
    """Run the job's training; add the number of operator calls."""
    with _kernels_only():
        return {**job.train(**options), "calls": len(_calls)}


def legacy_state(**options: Any) -> dict[str, Any]:
    """Return the legacy state of a job that runs with kernels only."""
    with _kernels_only():
        return job.legacy_state(**options)


def error_of_build(**options: Any) -> str:
    """Return the error of building the job with kernels only."""
    with _kernels_only():
        return job.error_of_build(**options)


def after_failure(**options: Any) -> dict[str, Any]:
    """Fail in the operator's second parameter; return the refusals, and a step from a loaded state."""
    with _kernels_only():
        mine = job.build(**options)
        job.step(mine, 0)
        kept = failure_cases.saved(mine)
        with (
            contextlib.suppress(failure_cases.OutOfLuckError),
            failure_cases.nth_call_fails(mapped_moments, "apply_adamw", 2),
        ):
            job.step(mine, 1)
        refused = [
            failure_cases.error_of(attempt)
            for attempt in (partial(job.step, mine, 1), partial(failure_cases.saved, mine))
        ]
        failure_cases.load(mine, kept)
        return {"refused": refused, "record": job.step(mine, 1), **job.state(mine)}
