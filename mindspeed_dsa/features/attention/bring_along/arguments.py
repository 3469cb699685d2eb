"""DSA's flags in Megatron-LM's parser, where it lacks them, and its loss in Megatron-LM's log."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mindspeed_dsa import session
from mindspeed_dsa.features.attention.dsa_module import dsa_module
from mindspeed_dsa.features.attention.loss_gate_impl import coefficient
from mindspeed_dsa.features.host import host

_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--experimental-attention-variant", {"choices": ["dsa"], "help": "Kind of attention: dsa."}),
    ("--dsa-indexer-n-heads", {"type": int, "help": "Heads of the indexer."}),
    ("--dsa-indexer-head-dim", {"type": int, "help": "Dimensions per head of the indexer."}),
    ("--dsa-indexer-topk", {"type": int, "help": "Keys that each query attends to."}),
    ("--dsa-indexer-loss-coeff", {"type": float, "help": "Weight of the indexer's loss; unset or 0: none."}),
    (
        "--dsa-indexer-use-sparse-loss",
        {
            "action": "store_true",
            "help": "Indexer's loss over the chosen keys only, not over all visible ones.",
        },
    ),
)


def with_dsa_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``megatron.training.arguments.parse_args`` through its own extension point."""

    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def provider(parser: Any) -> Any:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return add_dsa_flags(parser)

        return original(provider, *args, **kwargs)

    return parse_args


def add_dsa_flags(parser: Any) -> Any:
    """Add the flags that an argparse parser lacks, under Megatron's names; a fork may have some."""
    missing = [(name, options) for name, options in _FLAGS if name not in parser._option_string_actions]
    if missing:
        group = parser.add_argument_group(title="DeepSeek sparse attention")
        for name, options in missing:
            group.add_argument(name, **options)
    return parser


def log_indexer_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``megatron.training.training.training_log``; a collective of all ranks, once a step."""

    def training_log(*args: Any, **kwargs: Any) -> Any:
        job = host("training.global_vars")
        if coefficient(job.get_args()) > 0:
            # Parameters moved between releases; names did not.
            signature = inspect.signature(host("training.training").training_log)
            given = signature.bind(*args, **kwargs).arguments
            _track()(
                loss_scale=1 / host("core.num_microbatches_calculator").get_num_microbatches(),
                iteration=given["iteration"],
                writer=job.get_tensorboard_writer(),
                wandb_writer=job.get_wandb_writer(),
                total_loss_dict=given["total_loss_dict"],
            )
        return original(*args, **kwargs)

    return training_log


def _track() -> Callable[..., None]:
    """The tracker's report, which also tells step-metrics of each step's own share."""
    track: Callable[..., None] = dsa_module().DSAIndexerLossLoggingHelper.track_indexer_metrics
    running = session.current()
    if running is not None and "step-metrics" in running.settings.features_on:
        from mindspeed_dsa.features.training.metrics_impl import with_indexer_loss

        return with_indexer_loss(track)
    return track
