"""Training of the tiny model with weights of norms in fp32; runs inside the pool's workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.support import model as tiny
from tests.support import optimizer_job
from tests.support.optimizer_job import Job, drawn_gradients, gather, step

FLAG = {"init_norm_weight_in_fp32": True}


def is_of_a_norm(name: str) -> bool:
    """Whether a parameter's name says that it is a norm's, as the tiny model names them."""
    return "norm" in name


@torch.no_grad()
def _set_norms(change: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
    model: nn.Module = tiny.gpt_model(*args, **kwargs)
    for name, parameter in model.named_parameters():
        if is_of_a_norm(name):
            parameter.copy_(change(parameter))
    return model


def _in_bf16(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()


def from_equal_weights(
    switches: Mapping[str, Any],
    steps: int = 5,
    drawn: bool = False,
    ones: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train from weights of norms that bf16 holds exactly.

    Args:
        switches: for ``mindspeed_dsa.enable``.
        steps: how many.
        drawn: gradients are drawn, the same with any switches.
        ones: these weights are all one; else what the tiny model has, rounded.
        **options: of :func:`optimizer_job.build`.

    Returns:
        records of the steps; of norms by name ``before`` and ``weights``, both as the model has them, and the
        optimizer's ``masters``, of one rank's part as one axis.
    """

    def build(*args: Any, **kwargs: Any) -> nn.Module:
        return _set_norms(torch.ones_like if ones else _in_bf16, *args, **kwargs)

    with mock.patch.object(optimizer_job, "gpt_model", build):
        job = optimizer_job.build(switches, **options)
    before = norms(job)
    gradients = drawn_gradients if drawn else None
    records = [step(job, number, gradients=gradients) for number in range(steps)]
    gather(job)
    named = {name: each for name, each in job.model.named_parameters() if is_of_a_norm(name)}
    masters = {name: getattr(each, "main_param", each).detach().clone() for name, each in named.items()}
    return {"records": records, "before": before, "weights": norms(job), "masters": masters}


def norms(job: Job) -> dict[str, Tensor]:
    """Copies of the weights of norms, by name."""
    return {name: each.detach().clone() for name, each in job.model.named_parameters() if is_of_a_norm(name)}


def types_with_multi_token_prediction(switches: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Types of all parameters after the conversion to bf16, by name."""
    from megatron.core.transformer.module import Float16Module

    tiny.start(switches)
    cfg = tiny.config(bf16=True, params_dtype=torch.bfloat16, mtp_num_layers=1)
    model = Float16Module(cfg, tiny.gpt_model(cfg, mtp=True))
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


class ApexNorm(nn.Module):
    """Norm of a package that takes no two types at once, as Apex' kernels do not."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise to the same shape."""
        if hidden_states.dtype != self.weight.dtype:
            raise TypeError("expected one type")
        return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, 1e-6)


class TransformerEnginesLinear(nn.Module):
    """Linear layer that holds a norm and is not this library's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.ones(4))


def converted(kind: str) -> dict[str, Any]:
    """What becomes of modules of other packages: type of weight and output of one, and its class's name."""
    from megatron.core.transformer.module import Float16Module

    tiny.start(FLAG)
    cfg = tiny.config(bf16=True, params_dtype=torch.bfloat16)
    module = ApexNorm(8) if kind == "apex" else TransformerEnginesLinear()
    Float16Module(cfg, module)
    output = module(torch.randn(2, 8).bfloat16())
    return {"weight": module.weight.dtype, "output": output.dtype, "class": type(module).__name__}


def output_and_gradients(fused: bool, normalization: str, held: bool) -> dict[str, Tensor]:
    """A norm of bf16 rows with weights that bf16 does not hold, its fp32 weight's gradient, and its input.

    Args:
        fused: by the fused operator.
        normalization: ``RMSNorm`` or ``LayerNorm``.
        held: by a linear layer, whose product is left out.
    """
    tiny.start({**FLAG, **({"fused_operators": ["rmsnorm"]} if fused else {})})
    from megatron.core.transformer.module import Float16Module

    from mindspeed_dsa.megatron.local_modules import norm_of_fused_layer

    cfg = tiny.config(bf16=True, params_dtype=torch.bfloat16, normalization=normalization)
    model = Float16Module(cfg, tiny.gpt_model(cfg))
    layer = model.module.decoder.layers[0]
    generator = torch.Generator().manual_seed(3)
    norm = layer.mlp.linear_fc1 if held else layer.input_layernorm
    weight, bias = (
        (norm.layer_norm_weight, norm.layer_norm_bias) if held else (norm.weight, getattr(norm, "bias", None))
    )
    weight.data.normal_(1, 0.3, generator=generator)
    hidden = torch.randn(6, 2, 32, generator=generator).bfloat16().requires_grad_()
    output = norm_of_fused_layer(norm, hidden, cfg) if held else norm(hidden)
    arriving = torch.randn(output.shape, generator=generator).to(output.dtype)
    output.backward(arriving)
    return {
        "output": output.detach(),
        "arriving": arriving,
        "hidden": hidden.detach(),
        "hidden gradient": hidden.grad,
        "weight": weight.detach(),
        "weight gradient": weight.grad,
        **({} if bias is None else {"bias": bias.detach(), "bias gradient": bias.grad}),
    }
