"""Batch sizes of a job's training steps and evaluations, computed from its arguments before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.pipeline_chunks import is_v_shaped
from mindspeed_dsa.patches import versions

GLOBAL, SCHEDULE, RAMP = "--global-batch-size", "--step-batch-size-schedule", "--rampup-batch-size"
EVAL_GLOBAL, EVAL_MICRO = "--eval-global-batch-size", "--eval-micro-batch-size"
MASKING = "dataloader_inter_document_masking"
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Batches:
    """Batch sizes of all training steps, or of all evaluations.

    Attributes:
        least, most: samples of the smallest and the largest batch, over all ranks.
        micro: samples of a microbatch.
        replicas: data parallel size.
        flag: flag that sets the smallest batch.
        micro_flag: flag that sets the microbatch.
        entries: ``(threshold, batch size)`` pairs of a schedule, with thresholds as written.
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
        """Number of microbatches of the smallest batch on each data parallel rank."""
        # 256 samples, 2 per microbatch, 16 replicas: 8 microbatches.
        return self.least // (self.micro * self.replicas)

    @property
    def most_microbatches(self) -> int:
        """Number of microbatches of the largest batch on each data parallel rank."""
        return self.most // (self.micro * self.replicas)

    def enlarged(self, microbatches: int) -> str:
        """Return a flag, with its value, that gives each batch at least ``microbatches`` microbatches."""
        needed = microbatches * self.micro * self.replicas
        if not self.entries:
            return f"{self.flag} {needed}{' INCREMENT SAMPLES' if self.flag == RAMP else ''}"
        # Raise the sizes and keep the thresholds: two sizes may be equal, two thresholds may not.
        words = " ".join(f"{threshold}:{max(size, needed)}" for threshold, size in self.entries)
        return f"{self.flag} '{words}'"


def of_training(args: Any) -> Batches | None:
    """Return the batch sizes of a job's training steps, or ``None`` if its arguments do not state them.

    Megatron-LM since 0.18 supports a batch size schedule, and then ignores ``--rampup-batch-size``. With a
    schedule it sets ``global_batch_size`` to the samples of one microbatch.
    """
    whole, micro = argument(args, "global_batch_size"), argument(args, "micro_batch_size")
    replicas, ramp = _replicas(args), argument(args, "rampup_batch_size")
    schedule = argument(args, "step_batch_size_schedule")
    if not (micro and replicas):
        return None
    if schedule:
        try:
            entries = entries_of(schedule)
        except ValueError:  # Megatron reports it
            return None
        # "0:512 10B:1024" has the sizes 512 and 1024.
        sizes = [size for _, size in entries]
        return Batches(min(sizes), max(sizes), micro, replicas, SCHEDULE, entries=entries)
    if not whole:
        return None
    # Only releases without the schedule argument apply the ramp. It begins with ramp[0] samples.
    if ramp and not hasattr(args, "step_batch_size_schedule"):
        return Batches(int(ramp[0]), whole, micro, replicas, RAMP)
    return Batches(whole, whole, micro, replicas)


def of_evaluation(args: Any) -> Batches | None:
    """Return the batch sizes of a job's evaluations, or ``None`` if it has none or uses the training sizes.

    Releases before 0.18 always evaluate with the training sizes.
    """
    micro = argument(args, "eval_micro_batch_size") or argument(args, "micro_batch_size")
    whole = argument(args, "eval_global_batch_size") or argument(args, "global_batch_size")
    replicas = _replicas(args)
    told = argument(args, "eval_micro_batch_size") or argument(args, "eval_global_batch_size")
    if not evaluates(args) or not (told and micro and whole and replicas):
        return None
    return Batches(whole, whole, micro, replicas, EVAL_GLOBAL, EVAL_MICRO)


def _replicas(args: Any) -> int:
    """Return the number of ranks with samples of their own, or 0 if the arguments do not state it."""
    # From 0.19 on, shards of weights beyond TP have samples of their own and are not counted in the former.
    return (argument(args, "data_parallel_size") or 0) * (argument(args, "gtp_weight_remat_size") or 1)


def evaluates(args: Any) -> bool:
    """Return whether a job evaluates. Missing arguments count as yes."""
    return argument(args, "eval_iters") != 0 or bool(argument(args, "full_validation"))


def entries_of(schedule: str) -> tuple[tuple[str, int], ...]:
    """Parse Megatron's ``THRESHOLD:SIZE`` pairs, separated by blanks or commas.

    Returns:
        Pairs of threshold as written and batch size in samples.

    Raises:
        ValueError: no pair is given, or a pair is malformed or has a size below 1.
    """
    entries = []
    for pair in schedule.replace(",", " ").split():
        threshold, colon, size = pair.partition(":")
        if not (threshold and colon):
            raise ValueError(f"{pair!r} does not read THRESHOLD:SIZE")
        entries.append((threshold, _number(size)))
    if not entries or any(size < 1 for _, size in entries):
        raise ValueError(f"{schedule!r} has no batch size, or one below 1")
    return tuple(entries)


def delivers_conversations(args: Any) -> bool:
    """Return whether Megatron-LM's script passes the ends of the conversations of ``--sft`` to the model."""
    release = versions.of_job(args) or "0.16"
    return bool(argument(args, "sft")) and Version(release) >= Version("0.16")


def packs_of_megatron(args: Any) -> Sequence[str]:
    """Return the flags with which Megatron-LM's script delivers packed documents of its own."""
    flags = (("sft", "--sft"), (MASKING, "--dataloader-inter-document-masking"))
    return tuple(flag for name, flag in flags if argument(args, name))


def check_conversations(args: Any, flag: str) -> Iterator[str]:
    """Yield a problem if Megatron-LM gives the ends of conversations to some ranks of a pipeline only."""
    release = Version(versions.of_job(args) or "0.18")
    stages = argument(args, "pipeline_model_parallel_size") or 1
    per_rank = 2 if is_v_shaped(args) else argument(args, "virtual_pipeline_model_parallel_size") or 1
    splits = (argument(args, "tensor_model_parallel_size") or 1) > 1
    remedy = ""
    # 0.16: get_batch has packs for the first and the last chunk only.
    if Version("0.16") <= release < Version("0.17") and stages * per_rank > 2:
        remedy = "one pipeline stage"
    # 0.17: from the second stage on, only the first tensor parallel rank has them.
    elif Version("0.17") <= release < Version("0.18") and stages > 1 and splits:
        remedy = "one pipeline stage, or one tensor parallel rank"
    if remedy and argument(args, "sft"):
        yield (
            f"{flag} with --sft: Megatron-LM {release} gives the ends of conversations to some ranks of a "
            f"pipeline only, and others would attend across them; use Megatron-LM 0.18 or later, or {remedy}"
        )


def _number(text: str) -> int:
    # "2K" is 2000 samples.
    digits = text.strip().upper()
    factor = _SUFFIXES.get(digits[-1:], 1)
    return int(float(digits[:-1] if factor > 1 else digits) * factor)
