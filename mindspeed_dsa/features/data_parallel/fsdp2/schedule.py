"""FSDP2 in Megatron's schedule of pairs, which runs parts of layers and calls no layer as a module."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.data_parallel.fsdp2 import parts
from mindspeed_dsa.megatron.split_layers import transformer_layer
from mindspeed_dsa.patches.errors import SettingsError

_PARTS = "_mindspeed_dsa_fsdp2_parts"
_TAKEN_APART = ("TransformerBlock", "MoELayer", "MultiTokenPredictionBlock", "MultiTokenPredictionLayer")
"""Megatron's modules that schedule plans take things from, and never call."""


def follow(root: nn.Module, units: Collection[nn.Module], megatron: Megatron) -> None:
    """Have schedule plans of the model in ``root`` find what they gather.

    Weight gradients of attention and of dense MLPs wait for the end of a pair; those of a shared expert are
    what the combine is hidden behind in backward.

    Raises:
        SettingsError: a unit would never gather.
    """
    for module in units:
        for name in (each.__name__ for each in type(module).__mro__ if each.__name__ in _TAKEN_APART):
            raise SettingsError(
                f"fsdp2: a schedule of pairs never calls {name}, whose weights would not be gathered; drop "
                "it from sub_modules_to_wrap in --fsdp2-config-path, or omit --moe-fb-overlap "
                "(--overlap-moe-expert-parallel-comm)"
            )
    layers = megatron("core.transformer.transformer_layer").TransformerLayer
    moe = megatron("core.transformer.moe.moe_layer").MoELayer
    found = {
        unit: parts.Unit(
            unit, [part for each in unit.modules() if isinstance(each, moe) for part in each.modules()]
        )
        for unit in units
        if isinstance(unit, layers)
    }
    model = parts.Model(root, found.values())
    for each in root.modules():
        if (unit := found.get(transformer_layer(each))) is not None:
            setattr(each, _PARTS, unit)
        elif hasattr(each, "build_schedule_plan"):
            setattr(each, _PARTS, model)


def run_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TransformerLayerSchedulePlan.run``."""

    def run(
        f_layer: Any,
        b_layer: Any,
        f_input: Any = None,
        b_grad: Any = None,
        is_last_layer_in_bwd: bool = False,
    ) -> tuple[Any, Any]:
        forward, backward = (
            None if plan is None else getattr(plan.layer, _PARTS, None) for plan in (f_layer, b_layer)
        )
        with parts.beside(forward, backward):
            result: tuple[Any, Any] = original(f_layer, b_layer, f_input, b_grad, is_last_layer_in_bwd)
        if backward is not None and not is_last_layer_in_bwd:
            backward.finish()
        return result

    return run


def run_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TransformerModelChunkSchedulePlan.run``."""

    def run(
        f_schedule_plan: Any,
        b_schedule_plan: Any,
        b_grad: Any = None,
        pre_forward: Any = None,
        pre_backward: Any = None,
        post_forward: Any = None,
        post_backward: Any = None,
    ) -> Any:
        forward, backward = (
            None if plan is None else getattr(plan.state.model, _PARTS, None)
            for plan in (f_schedule_plan, b_schedule_plan)
        )

        def send_and_finish(*args: Any) -> None:
            post_backward(*args)
            if backward is not None:
                backward.finish()  # the first layer's, while its input's gradient is on its way

        if forward is not None:
            forward.begin_forward()
        if backward is not None:
            backward.begin_backward()
        output = original(
            f_schedule_plan,
            b_schedule_plan,
            b_grad,
            pre_forward,
            pre_backward,
            post_forward,
            None if post_backward is None else send_and_finish,
        )
        if backward is not None:
            backward.end_backward()
        return output

    return run
