"""Output projection and loss in chunks of tokens, compared with Megatron's, which form all logits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory.measure import peak_bytes
from benchmarks.registry import Metrics
from mindspeed_dsa import platforms
from mindspeed_dsa.ops.linear_cross_entropy import linear_cross_entropy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVIATION = {"fp32": 2e-5, "bf16": 2e-2}
"""Largest distance from the formula in fp64, relative to the norm."""
CLOCKS: dict[str, Callable[[], float]] = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}
GRADIENTS = ("forward", "backward")


@dataclass(frozen=True)
class Sizes:
    """Problem sizes."""

    tokens: int = 4096
    vocabulary: int = 129_280
    hidden: int = 512


@dataclass(frozen=True)
class Problem:
    """Inputs of the loss; every fourth token is masked."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    mask: Tensor

    @classmethod
    def of(cls, sizes: Sizes, dtype: torch.dtype, device: str) -> Problem:
        """Draw random inputs."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(sizes.tokens, sizes.hidden, generator=generator)
        weight = torch.randn(sizes.vocabulary, sizes.hidden, generator=generator) * 0.05
        labels = torch.randint(sizes.vocabulary, (sizes.tokens,), generator=generator)
        mask = (torch.arange(sizes.tokens) % 4 > 0).float()
        learned = (each.to(device, dtype).requires_grad_() for each in (hidden, weight))
        return cls(*learned, labels.to(device), mask.to(device))

    def head(self, tokens: int) -> Problem:
        """Return the problem of the first tokens."""
        hidden = self.hidden.detach()[:tokens].requires_grad_()
        return Problem(hidden, self.weight, self.labels[:tokens], self.mask[:tokens])

    @property
    def result_bytes(self) -> int:
        """Bytes of both gradients, which the caller holds in any case."""
        return sum(each.numel() * each.element_size() for each in (self.hidden, self.weight))


Losses = Callable[[Problem], Tensor]


def stock(problem: Problem) -> Tensor:
    """Return losses ``[tokens]`` of Megatron's linear layer and vocabulary parallel loss."""
    from megatron.core.tensor_parallel import layers, vocab_parallel_cross_entropy

    logits = layers.linear_with_grad_accumulation_and_async_allreduce(
        problem.hidden[:, None], problem.weight, None, False, False, False
    )
    losses: Tensor = vocab_parallel_cross_entropy(logits, problem.labels[:, None])
    return losses[:, 0]


def exact(problem: Problem) -> Tensor:
    """Return the losses by the formula in PyTorch, in fp64."""
    logits = problem.hidden.double() @ problem.weight.double().t()
    return F.cross_entropy(logits, problem.labels, reduction="none")


def ours(gradient: Any) -> Losses:
    """Return a function for this library's losses."""

    def losses(problem: Problem) -> Tensor:
        return linear_cross_entropy(
            problem.hidden,
            problem.weight,
            problem.labels,
            token_weights=problem.mask,
            gradient=gradient,
        ).loss

    return losses


def step(losses: Losses, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Run forward and backward of the mean over unmasked tokens; return losses and both gradients."""
    loss = losses(problem)
    mean = (loss * problem.mask).sum() / problem.mask.sum()
    grad_hidden, grad_weight = torch.autograd.grad(mean, (problem.hidden, problem.weight))
    return loss.detach(), grad_hidden, grad_weight


def run(device: str, quick: bool = False) -> Metrics:
    """Return all metrics of the case.

    Args:
        device: device to run on.
        quick: a problem too small for meaningful figures.
    """
    import mindspeed_dsa

    sizes = Sizes(tokens=512, vocabulary=2048, hidden=32) if quick else Sizes()
    with mindspeed_dsa.enabled(), _one_rank():
        metrics = {
            name: _measured(sizes, name, dtype, device, 2 if quick else 5) for name, dtype in DTYPES.items()
        }
    by_metric = {name: {dtype: each[name] for dtype, each in metrics.items()} for name in metrics["fp32"]}
    return {**by_metric, "tokens": sizes.tokens, "vocabulary": sizes.vocabulary, "hidden": sizes.hidden}


def _measured(sizes: Sizes, name: str, dtype: torch.dtype, device: str, rounds: int) -> dict[str, Any]:
    problem = Problem.of(sizes, dtype, device)
    sides = {"stock": stock, **{gradient: ours(gradient) for gradient in GRADIENTS}}
    _require_same(name, problem.head(64), sides)
    held = {side: peak_bytes(lambda f=losses: step(f, problem)) for side, losses in sides.items()}  # type: ignore[misc]
    taken: dict[str, dict[str, list[float]]] = {side: {clock: [] for clock in CLOCKS} for side in sides}
    platform = platforms.current()
    for number in range(rounds):
        # Every other round runs in reverse order, so that no side always comes first.
        for side in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            platform.synchronize()
            before = {clock: read() for clock, read in CLOCKS.items()}
            step(sides[side], problem)
            platform.synchronize()
            for clock, read in CLOCKS.items():
                taken[side][clock].append(read() - before[clock])
    # The caller holds both gradients in any case.
    beside = {side: held[side] - problem.result_bytes for side in sides}
    return {
        "loss_memory_ratio": {mode: beside[mode] / beside["stock"] for mode in GRADIENTS},
        "loss_memory_ratio_with_gradients": {mode: held[mode] / held["stock"] for mode in GRADIENTS},
        "loss_time_ratio": {mode: _ratio(taken, mode, "seconds") for mode in GRADIENTS},
        "loss_cpu_time_ratio": {mode: _ratio(taken, mode, "cpu_seconds") for mode in GRADIENTS},
        "peak_mib": {side: bytes_ / 2**20 for side, bytes_ in held.items()},
        "seconds": {side: statistics.median(times["seconds"]) for side, times in taken.items()},
    }


def _ratio(taken: dict[str, dict[str, list[float]]], side: str, clock: str) -> float:
    """Return the median ratio of a side's times to stock's times in the same turn."""
    pairs: Sequence[tuple[float, float]] = list(zip(taken[side][clock], taken["stock"][clock], strict=True))
    return statistics.median(mine / theirs for mine, theirs in pairs)


def _require_same(name: str, problem: Problem, sides: dict[str, Losses]) -> None:
    """Raise unless every side has the formula's losses and gradients."""
    expected = step(exact, problem)
    for side, losses in sides.items():
        for what, one, other in zip(
            ("losses", "gradient of the hidden states", "gradient of the weight"),
            step(losses, problem),
            expected,
            strict=True,
        ):
            deviation = float((one.double() - other.double()).norm() / other.double().norm())
            if not deviation < DEVIATION[name]:
                raise RuntimeError(f"{side}, {name}: {what} differ by {deviation:.1e} of their norm")


@contextmanager
def _one_rank() -> Any:
    """Run as the only tensor parallel rank."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
