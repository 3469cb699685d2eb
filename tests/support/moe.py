"""One MoE layer of Megatron's local specification and its training step; runs in the pool's workers."""

from __future__ import annotations

import re
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.feature import Feature
from mindspeed_dsa.parallel.all_to_all import InFlight
from tests.support import model

HIDDEN = 32
_RECOMPUTED = {"recompute_granularity": "selective"}
LAYERS: dict[str, dict[str, Any]] = {
    "one token": {"rows": (1,)},
    "all tokens to one rank, two experts empty": {"to_one": True},
    "no shared expert": {"moe_shared_expert_intermediate_size": None},
    "gate": {"moe_shared_expert_gate": True},
    "one expert per rank": {"num_moe_experts": 2},
    "layer recomputed": {**_RECOMPUTED, "recompute_modules": ["moe"]},
    "shared expert recomputed": {**_RECOMPUTED, "recompute_modules": ["shared_experts"]},
    "bf16": {"dtype": "bfloat16"},
    "frozen experts": {"frozen": ["experts.1.linear_fc1", "linear_fc2", "shared"]},
    "two experts share a weight": {"tied": True},
    "adapter": {"adapter": True},
    "main_grad": {"fusion": True},
    "main_grad, shared weight": {"fusion": True, "tied": True},
    "no gradients": {"graph": False},
}
"""Cases that a dispatch feature must serve like stock: arguments of the case, and of :func:`config`."""


def config(tp: int = 1, ep: int = 1, **overrides: Any) -> Any:
    """Return ``model.config`` of a plain transformer's MoE layer: four experts, two per token."""
    return model.config(
        **{
            "num_layers": 1,
            "moe_layer_freq": 1,
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": 1,
            **overrides,
        }
    )


def layer(cfg: Any) -> Any:
    """Build a layer with weights that depend only on their names; experts are numbered across ranks."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    spec = get_gpt_layer_local_spec(cfg.num_moe_experts, moe_grouped_gemm=cfg.moe_grouped_gemm)
    mlp = spec.submodules.mlp  # from 0.18 on a function
    built = mlp(config=cfg) if isinstance(mlp, partial) else build_module(mlp, config=cfg)
    built.set_layer_number(1)
    with torch.no_grad():
        parameters = dict(built.named_parameters())
        for name, matrix in by_name(built, torch.Tensor.detach).items():
            parameter = parameters.get(name, matrix)
            # Draw the full weight and take this rank's part, so that all layouts agree.
            full = list(matrix.shape)
            if _split(name, parameter):
                full[parameter.partition_dim] *= cfg.tensor_model_parallel_size
            noise = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight = 0.2 * torch.randn(full, generator=noise)
            matrix.copy_(model.shard(name, weight, parameter))
    return built


def _split(name: str, parameter: Any) -> bool:
    return "shared_experts" in name and getattr(parameter, "tensor_model_parallel", False)


def by_name(built: Any, of: Callable[[torch.nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Apply ``of`` to each parameter; return results by name, with experts numbered across ranks.

    The names are a ``SequentialMLP`` layer's; values of stacked experts are split.
    """
    first = built.local_expert_indices[0]
    values: dict[str, Tensor] = {}
    for name, parameter in built.named_parameters():
        value = of(parameter)
        stacked = re.fullmatch(r"experts\.mlp\.(\w+)\.weight", name)
        if value is None:
            continue
        if stacked:
            matrices = getattr(built.experts.mlp, stacked[1]).by_expert(value)
            names = [
                f"experts.local_experts.{index + first}.{stacked[1]}.weight" for index in range(len(matrices))
            ]
            values.update(zip(names, matrices, strict=True))
        else:
            values[re.sub(r"(?<=local_experts\.)\d+", lambda m: str(int(m[0]) + first), name)] = value
    return values


def named_parameters(built: Any) -> dict[str, Tensor]:
    """Return the parameters themselves; views of stacked experts."""
    return by_name(built, lambda parameter: parameter)


def tokens(rows: int, seed: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``[rows, batch, hidden]``, the same for the same seed."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(rows, batch, HIDDEN, generator=noise).to(dtype)


def train(
    built: Any, inputs: Sequence[Tensor], before_backward: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Run forward of all microbatches, then their backward in the same order, like a pipeline's warmup.

    Args:
        built: layer to run.
        inputs: inputs ``[rows, batch, hidden]`` of each microbatch.
        before_backward: function called after all forwards.

    Returns:
        ``outputs`` and ``inputs`` (gradients) by microbatch, ``weights`` (gradients) by name.
    """
    leaves = [each.clone().requires_grad_() for each in inputs]
    outputs = [built(leaf)[0] for leaf in leaves]
    if before_backward is not None:
        before_backward()
    for index, output in enumerate(outputs):
        # Each microbatch of each rank has another gradient.
        noise = torch.Generator().manual_seed(1000 + index + 10 * dist.get_rank())
        output.backward(torch.randn(output.shape, generator=noise).to(output.dtype))
    return {
        "outputs": [output.detach() for output in outputs],
        "inputs": [leaf.grad for leaf in leaves],
        "weights": by_name(built, lambda parameter: parameter.grad),
    }


@contextmanager
def transfers() -> Iterator[list[str]]:
    """Yield events: an all-to-all's launch, and its wait."""
    events: list[str] = []
    send = InFlight.send

    def launch(self: Any, rows: Tensor, reverse: bool = False) -> Any:
        pending = send(self, rows, reverse)
        wait = pending.works[0].wait
        events.append("launch")
        pending.works[0] = mock.Mock(wait=lambda: (events.append("wait"), wait()))
        return pending

    with mock.patch.object(InFlight, "send", launch):
        yield events


def assert_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], rtol: float = 1e-5) -> None:
    """Compare outputs and all gradients, each relative to its own largest entry."""
    assert ours["weights"].keys() == theirs["weights"].keys()
    pairs = {name: (ours["weights"][name], theirs["weights"][name]) for name in theirs["weights"]}
    for kind in ("outputs", "inputs"):
        assert len(ours[kind]) == len(theirs[kind])
        pairs |= {
            f"{kind} of microbatch {index}": pair
            for index, pair in enumerate(zip(ours[kind], theirs[kind], strict=True))
        }
    for name, (mine, stock) in pairs.items():
        difference = (mine.double() - stock.double()).abs().max() if stock.numel() else 0.0
        assert difference <= rtol * float(stock.abs().max() if stock.numel() else 0), f"{name}: {difference}"


def assert_as_stock(
    name: str, run: Mapping[str, Any], found: Mapping[str, Any], transfers: int, rtol_bf16: float
) -> None:
    """Check a run of :data:`LAYERS`: results, whether gradients were fused, and transfers of each pass."""
    ours = found["ours"]
    assert_same(ours, found["theirs"], rtol=rtol_bf16 if "bf16" in name else 1e-5)
    fused = [weight for weight in ours["weights"] if "experts." in weight and "True" in weight]
    assert bool(fused) == ("main_grad" in name)
    # A forward and a backward; a recomputed layer repeats its forward.
    passes = 1 if "graph" in run else 3 if "layer recomputed" in name else 2
    assert found["launched"] == transfers * passes * len(ours["outputs"]), name


def assert_refused(
    feature: Feature, served: Mapping[str, Any], arguments: Mapping[str, Any], flag: str, words: str
) -> None:
    """Check that arguments give one problem, which begins with the flag, and served arguments none."""
    (problem,) = feature.problems(Namespace(**{**served, **arguments}))
    assert problem.startswith(flag)
    assert words in problem
    assert list(feature.problems(Namespace(**served))) == []
