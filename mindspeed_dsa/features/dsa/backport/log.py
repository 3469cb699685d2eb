"""The indexer loss in Megatron-LM's log."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.backport.feature import Options
from mindspeed_dsa.features.dsa.indexer_loss import coefficient, indexer_loss
from mindspeed_dsa.megatron.indexer_loss import keep_step_loss


def log_indexer_loss(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``megatron.training.training.training_log``; a collective of all ranks, once per step."""

    def training_log(*args: Any, **kwargs: Any) -> Any:
        job = context.megatron("training.global_vars")
        if coefficient(job.get_args()) > 0:
            # Parameters moved between releases; names did not.
            signature = inspect.signature(context.megatron("training.training").training_log)
            given = signature.bind(*args, **kwargs).arguments
            keep_step_loss(indexer_loss(context.megatron).tracker.track_indexer_metrics, context)(
                loss_scale=1 / context.megatron("core.num_microbatches_calculator").get_num_microbatches(),
                iteration=given["iteration"],
                writer=job.get_tensorboard_writer(),
                wandb_writer=job.get_wandb_writer(),
                total_loss_dict=given["total_loss_dict"],
            )
        return original(*args, **kwargs)

    return training_log
