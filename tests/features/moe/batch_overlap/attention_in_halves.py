"""Worker functions: models whose layers run in halves, attention included."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor

from mindspeed_dsa.log import Log
from tests.features.attention.context_parallel import dense_model
from tests.features.moe.balanced_experts.popular_experts import watched
from tests.features.moe.batch_overlap.layer_in_halves import times
from tests.support import model, moe


def trained(dense: bool = False, experts_alone: bool = False, **arguments: Any) -> dict[str, Any]:
    """Run a training step; also return the number of halves, and of halves passed directly to the next layer.

    Args:
        dense: whether attention is dense.
        experts_alone: whether layers with experts have no attention, as in hybrid models.
        **arguments: arguments of ``model.run``.
    """
    from mindspeed_dsa.features.moe.batch_overlap import attention, stages

    if dense:
        arguments["switches"] = {**arguments["switches"], **DENSE}
    with (
        _dense() if dense else contextlib.nullcontext(),
        _experts_alone() if experts_alone else contextlib.nullcontext(),
        moe.transfers() as events,
        mock.patch.object(stages.Stages, "attend", autospec=True, side_effect=stages.Stages.attend) as halves,
        mock.patch.object(attention, "_stand_in", side_effect=attention._stand_in) as handed_on,
        _balancing() as losses,
    ):
        result = model.run(**arguments)
    return {
        **result,
        "launched": events.count("launch"),
        "halves": halves.call_count,
        "handed on": handed_on.call_count,
        "balancing": losses(),
    }


@contextlib.contextmanager
def _balancing() -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Yield a function that returns the load-balancing and indexer losses that Megatron logs."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
    from megatron.core.transformer.moe import moe_utils

    # Losses of earlier runs are still in Megatron's tracker.
    moe_utils.clear_aux_losses_tracker()

    def losses() -> dict[str, Tensor]:
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        logged = {name: entry["values"].clone() for name, entry in tracker.items()}
        dsa = DSAIndexerLossLoggingHelper.tracker
        return logged | ({"indexer": dsa["values"].clone()} if "values" in dsa else {})

    yield losses


@contextlib.contextmanager
def _experts_alone() -> Iterator[None]:
    """Have layers with experts hold nothing else, as those of a hybrid model's pattern do."""
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    build = model.gpt_model

    def gpt_model(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        for layer in built.decoder.layers:
            if hasattr(layer.mlp, "router"):
                layer.input_layernorm = layer.self_attention = IdentityOp()
                layer.self_attn_bda = IdentityFuncOp()
        return built

    with mock.patch.object(model, "gpt_model", gpt_model):
        yield


DENSE = {
    "experimental_attention_variant": None,
    "multi_latent_attention": True,
    "transformer_impl": "local",
}


@contextlib.contextmanager
def _dense() -> Iterator[None]:
    """Make ``tests.support.model`` build models with dense attention inside the block."""
    sizes = {**model.LATENT, **model.EXPERTS, "num_attention_heads": dense_model.HEADS}
    made = partial(dense_model.latent_config, transformer_impl="local", **sizes)
    with (
        mock.patch.object(model, "config", made),
        mock.patch.object(model, "gpt_model", dense_model.gpt_model),
        mock.patch.object(model, "SEQUENCE", dense_model.SEQUENCE),
    ):
        yield


def order(switch: Mapping[str, Any], layers: int = 2, sequences: int = 2) -> dict[str, list[str]]:
    """Return the events of a forward and backward of MoE layers: transfers, attention, experts."""
    model.start(switch, ep=2, etp=1)
    built = model.gpt_model(
        model.config(num_layers=layers, moe_layer_freq=1, expert_model_parallel_size=2, **WITHOUT_LOSS)
    )
    with moe.transfers() as events:
        for layer in built.decoder.layers:
            parts = {"attention": layer.self_attention, "experts": layer.mlp.experts}
            for name, module in {**parts, "shared expert": layer.mlp.shared_experts}.items():
                module.register_forward_hook(partial(_runs, events, f"{name} {layer.layer_number}"))
        loss = model.per_token_loss(built, model.samples(sequences)).sum()
        forward, events[:] = list(events), []
        loss.backward()
    return {"forward": forward, "backward": events}


def moved(**arguments: Any) -> dict[str, Any]:
    """Run :func:`trained`; also return the experts of each plan."""
    with watched() as records:
        return {**trained(**arguments), **records}


def measured(seconds: Mapping[str, float], **arguments: Any) -> dict[str, Any]:
    """Run :func:`trained` with fake measured times; also return the measured ways and the log lines."""
    lines: list[str] = []

    def info(_: Any, line: str, *args: Any, **kwargs: Any) -> None:
        lines.append(line % args)

    with times(seconds) as ways, mock.patch.object(Log, "info", info):
        result = trained(**arguments)
    return {**result, "ways": ways, "lines": lines}


WITHOUT_LOSS = {"dsa_indexer_loss_coeff": 0.0}


def _runs(events: list[str], name: str, module: Any, args: Any, output: Any) -> None:
    output = output[0] if isinstance(output, tuple) else output
    events.append(name)
    if output.requires_grad:
        # The backward's event, when the output's gradient arrives.
        output.register_hook(lambda _: events.append(name))
