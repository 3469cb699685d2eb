"""Worker functions: training of the tiny model with norm weights in fp32."""

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
    """Whether a parameter of the tiny model belongs to a norm, by its name."""
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
    """Train from norm weights that bf16 holds exactly.

    Args:
        switches: feature switches for ``mindspeed_dsa.enable``.
        steps: number of steps.
        drawn: whether gradients are random, and the same for all switches.
        ones: whether norm weights start at one; otherwise they are the tiny model's, rounded.
        **options: options of :func:`optimizer_job.build`.

    Returns:
        records of the steps; ``before`` and ``weights`` by norm name, in the model's form; and the
        optimizer's ``masters``, flattened.
    """

    def build(*args: Any, **kwargs: Any) -> nn.Module:
        return _set_norms(torch.ones_like if ones else _in_bf16, *args, **kwargs)

    with mock.patch.object(optimizer_job, "gpt_model", build):
        job = optimizer_job.build(switches, **options)
    before = norms(job)
    gradients = drawn_gradients if drawn else None
    records = [step(job, number, gradients=gradients) for number in range(steps)]
    # With overlapped gathering, weights arrive later than the step.
    gather(job)
    named = {name: each for name, each in job.model.named_parameters() if is_of_a_norm(name)}
    # An fp32 weight is its own master.
    masters = {name: getattr(each, "main_param", each).detach().clone() for name, each in named.items()}
    return {"records": records, "before": before, "weights": norms(job), "masters": masters}


def norms(job: Job) -> dict[str, Tensor]:
    """Return copies of the norm weights, by name."""
    return {name: each.detach().clone() for name, each in job.model.named_parameters() if is_of_a_norm(name)}


def types_with_multi_token_prediction(switches: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Return the dtypes of all parameters by name, after the conversion to bf16."""
    from megatron.core.transformer.module import Float16Module

    tiny.start(switches)
    cfg = tiny.config(bf16=True, params_dtype=torch.bfloat16, mtp_num_layers=1)
    model = Float16Module(cfg, tiny.gpt_model(cfg, mtp=True))
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


class ApexNorm(nn.Module):
    """Norm that needs input and weight of one dtype, as Apex' kernels do."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise, and keep the shape."""
        if hidden_states.dtype != self.weight.dtype:
            raise TypeError("expected one type")
        return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, 1e-6)


class TransformerEnginesLinear(nn.Module):
    """Linear layer with a norm weight that is not this library's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.ones(4))


def converted(kind: str) -> dict[str, Any]:
    """Return the weight dtype, output dtype and class name of another package's module after conversion."""
    from megatron.core.transformer.module import Float16Module

    tiny.start(FLAG)
    cfg = tiny.config(bf16=True, params_dtype=torch.bfloat16)
    module = ApexNorm(8) if kind == "apex" else TransformerEnginesLinear()
    Float16Module(cfg, module)
    output = module(torch.randn(2, 8).bfloat16())
    return {"weight": module.weight.dtype, "output": output.dtype, "class": type(module).__name__}


def output_and_gradients(fused: bool, normalization: str, held: bool) -> dict[str, Tensor]:
    """Return output and gradients of a norm with bf16 rows and an fp32 weight that bf16 cannot hold.

    Args:
        fused: whether the fused operator computes it.
        normalization: ``RMSNorm`` or ``LayerNorm``.
        held: whether a linear layer holds the norm; its product is skipped.
    """
    tiny.start({**FLAG, **({"fused_operators": ["rmsnorm"]} if fused else {})})
    from megatron.core.transformer.module import Float16Module

    from mindspeed_dsa.megatron.local_modules import norm_of_fused_layer

    cfg = tiny.config(bf16=True, params_dtype=torch.bfloat16, normalization=normalization)
    model = Float16Module(cfg, tiny.gpt_model(cfg))
    layer = model.module.decoder.layers[0]
    generator = torch.Generator().manual_seed(3)
    norm = layer.mlp.linear_fc1 if held else layer.input_layernorm
    # Fused layers hold the weight under another name.
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
