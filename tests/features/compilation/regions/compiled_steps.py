"""Worker functions: steps of the tiny model with compiled regions, and the compiler's counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from tests.features.operators import fused_modules as operators
from tests.support import model as job
from tests.support.contexts import running

ROUTING = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
BATCHES = (3, 3, 3, 2, 1)
"""Number of sequences per microbatch; the last two are short."""


def train(
    switches: Mapping[str, Any],
    tp: int = 1,
    overrides: Mapping[str, Any] | None = None,
    code: bool = False,
    differentiated: bool = True,
    deterministic: bool = False,
) -> dict[str, Any]:
    """Return losses and gradients of the microbatches, an evaluation, and the regions' counts.

    Args:
        switches: feature switches of the session.
        tp: tensor parallel size; sequence parallelism is on if it is above 1.
        overrides: config fields that differ from the tiny model's.
        code: whether code is generated. Otherwise graphs run operator by operator, without a toolchain.
        differentiated: whether backward graphs are also made without generated code.
        deterministic: whether torch's deterministic algorithms are on.
    """
    job.start(switches, tp=tp)
    layout = {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1}
    with contextlib.nullcontext() if code else operator_by_operator(differentiated):
        torch.use_deterministic_algorithms(deterministic)
        try:
            results = _steps(job.config(**{**ROUTING, **layout, **(overrides or {})}))
        finally:
            torch.use_deterministic_algorithms(False)
    return results


@contextlib.contextmanager
def operator_by_operator(differentiated: bool = False) -> Iterator[None]:
    """Run compiled graphs operator by operator inside the block, which needs no toolchain.

    Args:
        differentiated: whether backward also gets a graph, as with generated code. Most compile time goes
            there.
    """
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    from mindspeed_dsa.features.compilation.regions import region

    run = aot_eager if differentiated else _as_it_is
    with (
        # Inductor needs a toolchain; its settings do not matter without it.
        mock.patch.object(compile_fx, "compile_fx", lambda graph, inputs, **options: run(graph, inputs)),
        mock.patch.object(region, "inductor_settings", return_value={}),
    ):
        yield


def _as_it_is(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    return graph.forward


def _steps(cfg: Any) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    counters.clear()
    model = job.gpt_model(cfg).train()
    losses, counts = [], []
    for number, sequences in enumerate(BATCHES):
        loss = job.per_token_loss(model, job.samples(sequences, number)).mean()
        loss.backward()
        losses.append(loss.detach())
        counts.append(compilations())
    gradients = {name: each.grad for name, each in job.global_names(model).items() if each.grad is not None}
    # Evaluation has graphs of its own.
    model.eval()
    with torch.no_grad():
        losses.append(job.per_token_loss(model, job.samples(2)).mean())
    return {
        "losses": torch.stack(losses),
        "gradients": gradients,
        "counts": counts,
        "after evaluation": compilations(),
        "failures": {region.name: region.failure for region in regions() if region.failure},
        "graph_breaks": sum(counters["graph_break"].values()),
        "cached": counters["aot_autograd"]["autograd_cache_hit"],
    }


def regions() -> list[Any]:
    """Return the session's compiled regions."""
    from mindspeed_dsa.features.compilation.regions.region import regions_of

    context = running("compile-regions")
    return list(regions_of(context).all()) if context else []


def compilations() -> dict[str, int]:
    return {region.name: region.compilations for region in regions()}


def train_and_fail(switches: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Run :func:`train` without a C++ compiler, or with a compiler that fails."""
    from torch._inductor import compile_fx

    from mindspeed_dsa.features.compilation.regions import region

    # Only the first line of an error belongs in the log.
    def refuse(graph: Any, inputs: Any, **options: Any) -> Any:
        raise NotImplementedError("no code for this graph\nand more about it")

    messages: list[str] = []
    with mock.patch(
        "mindspeed_dsa.log.Log.warning", lambda self, text, *args, **named: messages.append(text % args)
    ):
        if what == "toolchain":
            with mock.patch.object(region.shutil, "which", return_value=None):
                result = train(switches, code=True)
        else:
            with mock.patch.object(compile_fx, "compile_fx", refuse):
                result = train(switches, code=True)
    return {**result, "messages": messages}


def tried(works: bool) -> tuple[dict[str, Any], list[str]]:
    """Return Inductor's settings, and the tried ones of two vector instruction sets."""
    from torch._inductor import cpu_vec_isa

    from mindspeed_dsa.features.compilation.regions import region

    asked: list[str] = []

    # torch asks each set whether it works, by its truth value.
    class Instructions(str):
        def __bool__(self) -> bool:
            asked.append(str(self))
            return works

    names = ("amx_tile", "avx512 avx512_vnni", "avx2")
    with (
        mock.patch.object(cpu_vec_isa, "supported_vec_isa_list", [Instructions(each) for each in names]),
        mock.patch.object(cpu_vec_isa, "x86_isa_checker", return_value=["avx2", "avx512", "avx512_vnni"]),
        mock.patch.object(region.platform, "machine", return_value="x86_64"),
    ):
        return region.inductor_settings.__wrapped__("cpu"), asked


def train_after_inference(switches: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss of a training step whose rotary angles were cached in inference mode."""
    job.start(switches)
    with operator_by_operator():
        model = job.gpt_model(job.config()).train()
        with torch.inference_mode():
            job.per_token_loss(model, job.samples(2))
        loss = job.per_token_loss(model, job.samples(2)).mean()
        loss.backward()
        return loss.detach()


def pair(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of ten steps of the tiny model in bf16 with an optimizer."""
    with operator_by_operator(differentiated=True):
        return operators.pair(switches)
