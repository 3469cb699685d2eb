"""One record per step: in Megatron-LM's training loop, or in a job's own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.load_report.counting import counts_of
from mindspeed_dsa.features.moe.load_report.feature import Options
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.runs import expert_load, metrics


def use_own_loop(context: Context[Options]) -> None:
    """Say, before the model is built, that the job calls :func:`record_step`."""
    counts_of(context).own_loop = True


def record_step(context: Context[Options], step: int, writer: Any = None) -> None:
    """Write the record of the step that has just been made; all ranks call this together.

    Args:
        context: of the session, ``session.contexts["moe-router-load-report"]``.
        step: its number, from 1.
        writer: TensorBoard's ``SummaryWriter`` on the last rank, or nothing.
    """
    layers = counts_of(context).take()
    if not layers:
        return
    record = expert_load.record(step, layers)
    metrics.append(context.options.folder / expert_load.FILE, record)
    if writer is not None:
        _show(writer, step, record)


def _show(writer: Any, step: int, record: metrics.Record) -> None:
    for layer in record["layers"]:
        group = f"moe load/layer {layer['layer']}"
        writer.add_scalar(f"{group} rank imbalance", layer["rank_imbalance"], step)
        writer.add_scalar(f"{group} expert imbalance", layer["expert_imbalance"], step)
        # One histogram for all experts of a layer; the mean load is 1, so that layers can be compared.
        mean = max(sum(layer["experts"]), 1) / len(layer["experts"])
        writer.add_histogram(f"{group} experts", torch.tensor(layer["experts"]) / mean, step)
    for stage in record["stages"]:
        writer.add_scalar(f"moe load/stage {stage['stage']} imbalance", stage["imbalance"], step)


def record_after_log(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``training_log``."""

    def training_log(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # Parameters moved between releases; names did not.
        signature = inspect.signature(context.megatron("training.training").training_log)
        step = int(signature.bind(*args, **kwargs).arguments["iteration"])
        variables = context.megatron("training.global_vars")
        job, writer = variables.get_args(), variables.get_tensorboard_writer()
        due = writer is not None and step % job.tensorboard_log_interval == 0
        record_step(context, step, writer if due else None)
        return result

    return training_log


def require_loop(context: Context[Options]) -> None:
    """Refuse a job in which nobody would record a step.

    Raises:
        MindSpeedDSAError: it does not use Megatron-LM's training loop, and has not said that it records.
    """
    has_loop = f"{context.megatron.root}.training.training" in sys.modules
    if not has_loop and not counts_of(context).own_loop:
        raise MindSpeedDSAError(
            f"mindspeed_dsa: {context.feature}: --moe-router-load-report records steps of Megatron-LM's own "
            "training loop (megatron.training), and this job does not use it; call use_own_loop and "
            f"record_step of {__name__} in the job's own loop, or omit the flag"
        )
