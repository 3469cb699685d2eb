"""Batches of a job's steps and of its evaluations, as its arguments say them before training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.megatron.configuration import argument

GLOBAL, SCHEDULE, RAMP = "--global-batch-size", "--step-batch-size-schedule", "--rampup-batch-size"
EVAL_GLOBAL, EVAL_MICRO = "--eval-global-batch-size", "--eval-micro-batch-size"
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Batches:
    """Batches of all steps, or of all evaluations.

    Attributes:
        least, most: samples of the smallest and of the largest one, over all ranks.
        micro: samples of a microbatch.
        replicas: data parallel size.
        flag: flag that sets the smallest one.
        micro_flag: flag that sets the microbatch.
        entries: thresholds of a schedule as they are written, each with its size.
    """

    least: int
    most: int
    micro: int
    replicas: int
    flag: str = GLOBAL
    micro_flag: str = "--micro-batch-size"
    entries: tuple[tuple[str, int], ...] = ()

    @property
    def microbatches(self) -> int:
        """Return how many microbatches the smallest one has on each data parallel rank."""
        return self.least // (self.micro * self.replicas)

    @property
    def most_microbatches(self) -> int:
        """Return the same of the largest one."""
        return self.most // (self.micro * self.replicas)

    def enlarged(self, microbatches: int) -> str:
        """Return a flag of Megatron's with which every batch has so many microbatches, or more."""
        needed = microbatches * self.micro * self.replicas
        if not self.entries:
            return f"{self.flag} {needed}"
        # Two sizes of a schedule may be the same, its thresholds may not.
        words = " ".join(f"{threshold}:{max(size, needed)}" for threshold, size in self.entries)
        return f"{self.flag} '{words}'"


def of_training(args: Any) -> Batches | None:
    """Return the batches of a job's steps; None where its arguments do not say them.

    Releases that know a schedule, 0.18 and later, ignore a ramp, and give ``global_batch_size`` the samples
    of one microbatch beside a schedule.
    """
    whole, micro = argument(args, "global_batch_size"), argument(args, "micro_batch_size")
    replicas, ramp = argument(args, "data_parallel_size"), argument(args, "rampup_batch_size")
    schedule = argument(args, "step_batch_size_schedule")
    if not (micro and replicas):
        return None
    if schedule:
        try:
            entries = entries_of(schedule)
        except ValueError:  # which Megatron reports
            return None
        sizes = [size for _, size in entries]
        return Batches(min(sizes), max(sizes), micro, replicas, SCHEDULE, entries=entries)
    if not whole:
        return None
    if ramp and not hasattr(args, "step_batch_size_schedule"):
        return Batches(int(ramp[0]), whole, micro, replicas, RAMP)
    return Batches(whole, whole, micro, replicas)


def of_evaluation(args: Any) -> Batches | None:
    """Return the batches of a job's evaluations; None without one, and where they are those of its steps.

    Releases before 0.18 evaluate with the sizes of training.
    """
    micro = argument(args, "eval_micro_batch_size") or argument(args, "micro_batch_size")
    whole = argument(args, "eval_global_batch_size") or argument(args, "global_batch_size")
    replicas = argument(args, "data_parallel_size")
    told = argument(args, "eval_micro_batch_size") or argument(args, "eval_global_batch_size")
    if not evaluates(args) or not (told and micro and whole and replicas):
        return None
    return Batches(whole, whole, micro, replicas, EVAL_GLOBAL, EVAL_MICRO)


def evaluates(args: Any) -> bool:
    """Return whether a job evaluates; arguments that it lacks do not say no."""
    return argument(args, "eval_iters") != 0 or bool(argument(args, "full_validation"))


def entries_of(schedule: str) -> tuple[tuple[str, int], ...]:
    """Read Megatron's ``THRESHOLD:SIZE`` pairs, with blanks or commas between them.

    Returns:
        Each threshold as it is written, with its batch size in samples.

    Raises:
        ValueError: there is none, or one is no such pair.
    """
    entries = []
    for pair in schedule.replace(",", " ").split():
        threshold, colon, size = pair.partition(":")
        if not (threshold and colon):
            raise ValueError(f"{pair!r} does not read THRESHOLD:SIZE")
        entries.append((threshold, _number(size)))
    if not entries or any(size < 1 for _, size in entries):
        raise ValueError(f"{schedule!r} has no batch size above 0")
    return tuple(entries)


def _number(text: str) -> int:
    digits = text.strip().upper()
    factor = _SUFFIXES.get(digits[-1:], 1)
    return int(float(digits[:-1] if factor > 1 else digits) * factor)
