"""Checks of Megatron configurations, for jobs that do not use Megatron's argument parser.

A feature's check is a generator ``check(args, options)`` that yields a sentence per problem. The session runs
it on the job's arguments. Without Megatron's parser, :func:`require` runs it on the configuration of a model
or an optimizer when that is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Check, Context
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs.whole_checkpoints import tracked


def require(context: Context[Any], check: Check, *configurations: Any) -> None:
    """Run a feature's check on Megatron's configurations, and raise if it yields problems.

    Args:
        context: feature's context.
        check: check to run.
        configurations: Megatron's configurations; an attribute is read from the first one that has it.

    Raises:
        SettingsError: the check yields problems.
    """
    problems = list(check(_Together(configurations), context.options))
    if problems:
        raise SettingsError(f"{context.feature}: " + "; ".join(problems))


def argument(args: Any, name: str) -> Any:
    """Return one of Megatron's arguments, or ``None`` if the namespace or configuration lacks it."""
    return getattr(args, name, None)


def builds_by_engine(args: Any) -> bool:
    """Return whether a job's arguments have Megatron-LM build its layers of Transformer Engine's modules.

    A model's configuration says nothing about it: ``transformer_engine`` is its default, whatever is built.
    """
    parsed = hasattr(args, "num_experts")  # a configuration has `num_moe_experts`
    return (
        parsed
        and argument(args, "transformer_impl") == "transformer_engine"
        and find_spec("transformer_engine") is not None
    )


def loaded_step(args: Any) -> int:
    """Return the step of the checkpoint that a job goes on from; 0 if it begins anew."""
    load = argument(args, "load")
    if not load or argument(args, "finetune"):
        return 0
    reached = argument(args, "ckpt_step") or tracked(Path(load))[0]
    return reached if isinstance(reached, int) else 0


def check_trains(args: Any, flag: str) -> Iterator[str]:
    """Yield a problem if a job makes no training step for a feature to record.

    Args:
        args: job's arguments.
        flag: feature's flag.
    """
    if argument(args, "skip_train"):
        yield f"{flag} records training steps, and --skip-train makes none; omit one of them"


def check_cached_saves(args: Any, flag: str, tensors: str) -> Iterator[str]:
    """Yield an error if asynchronous saves read the memory of the first save again, and tensors are new."""
    # nvidia-resiliency-ext caches the handles of device memory by names and shapes alone.
    by_nvrx = argument(args, "async_save") and argument(args, "async_strategy") == "nvrx"
    is_cached = argument(args, "ckpt_assume_constant_structure")
    if by_nvrx and is_cached and not argument(args, "async_ckpt_use_cpu_shm"):
        yield (
            f"{flag}: with --async-strategy nvrx, --ckpt-assume-constant-structure saves the memory of the "
            f"first save again, and {tensors} lie elsewhere in each save; omit it"
        )


_GATHERED = "modules then gather weights in forward and backward, into memory that this knows nothing of"


def check_weight_shards(args: Any, flag: str, why: str = _GATHERED) -> Iterator[str]:
    """Yield an error if weights are split into more shards than there are tensor parallel ranks.

    Since Megatron-core 0.19 this is possible: modules gather the additional shards before use.
    """
    ranks = argument(args, "tensor_model_parallel_size") or 1
    for kind, whole in (("", ranks), ("expert_", argument(args, "expert_tensor_parallel_size") or ranks)):
        name = f"{kind}tensor_parallel_num_weight_shards"
        shards = argument(args, name) or 1
        if shards > whole:
            yield (
                f"{flag} does not combine with --{name.replace('_', '-')} {shards}: {why}; use {whole} or "
                "omit one of them"
            )


def cuts_weights_further(args: Any) -> bool:
    """Return whether weights have more shards than tensor parallel ranks, as from Megatron-core 0.19 on."""
    ranks = argument(args, "tensor_model_parallel_size") or 1
    return (argument(args, "tensor_parallel_num_weight_shards") or 1) > ranks


def hybrid_flag(args: Any) -> str:
    """Return the flag that makes the job's model a hybrid one, which is no ``GPTModel``; empty without."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model")
    return next((f"--{name.replace('_', '-')}" for name in names if argument(args, name)), "")


def cuts_of_muon(args: Any) -> str:
    """Return a clause if Muon updates each tensor parallel rank's part of a weight by itself, or ""."""
    optimizer = str(argument(args, "optimizer") or "")
    if "muon" not in optimizer or argument(args, "muon_tp_mode") not in (None, "blockwise"):
        return ""
    return f"--optimizer {optimizer} updates the parts of each tensor parallel rank by themselves"


class _Together:
    """Read-only namespace over several configurations, searched in order."""

    def __init__(self, configurations: Sequence[Any]) -> None:
        self._configurations = configurations

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that this object lacks.
        for configuration in self._configurations:
            if hasattr(configuration, name):
                return getattr(configuration, name)
        raise AttributeError(name)
