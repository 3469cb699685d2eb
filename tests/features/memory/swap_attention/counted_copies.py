"""Worker functions: steps with saved tensors on the host, and counts of all copies."""

from __future__ import annotations

import gc
import io
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.features.memory import recompute_cases
from tests.features.memory.recompute_cases import PLAIN, built
from tests.support import model as job


class Copies:
    """Bytes of each copy to the host and back, in order."""

    def __init__(self) -> None:
        self.out: list[int] = []
        self.back: list[int] = []


@contextmanager
def copies() -> Iterator[Copies]:
    """Record the platform's copies to and from the pool of host buffers."""
    from mindspeed_dsa.platforms.base import Platform
    from mindspeed_dsa.platforms.host_pool import shared

    seen, copy = Copies(), Platform.copy_async

    def watched(self: Any, destination: Tensor, source: Tensor) -> Any:
        if shared.holds(destination):
            seen.out.append(destination.nbytes)
        if shared.holds(source):
            seen.back.append(destination.nbytes)
        return copy(self, destination, source)

    with mock.patch.object(Platform, "copy_async", watched):
        yield seen


def in_use() -> int:
    """Return the bytes that are not yet returned to the pool."""
    from mindspeed_dsa.platforms.host_pool import shared

    return shared.figures().in_use


def train(**arguments: Any) -> dict[str, Any]:
    """Run :func:`recompute_cases.train`; add bytes copied ``out`` and ``back``, and bytes still ``in
    use``.
    """
    with copies() as seen:
        result = recompute_cases.train(**arguments)
    return {**result, "out": sum(seen.out), "back": sum(seen.back), "in use": in_use()}


def kept_bytes(**arguments: Any) -> dict[str, int]:
    """Run :func:`recompute_cases.kept_bytes`; add the bytes that one backward copies ``back``.

    ``back`` equals the bytes that were off the device. Copies of an unused graph are never copied back.
    """
    with copies() as seen:
        result = recompute_cases.kept_bytes(**arguments)
    # kept_bytes runs two equal steps.
    assert len(seen.back) % 2 == 0, "two steps alike"
    return {**result, "back": sum(seen.back) // 2}


def logits(model: Any, tokens: Tensor) -> Tensor:
    """Return logits ``[batch, sequence, vocabulary]``, which, unlike the loss, allow a second backward."""
    result: Tensor = model(tokens[:, :-1], torch.arange(job.SEQUENCE).expand(2, -1), None)
    return result


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of all parameters, and clear them."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def in_flight(switches: Mapping[str, Any], order: list[int]) -> list[dict[str, Tensor]]:
    """Run three forwards, then their backwards in any order; return the gradients of each."""
    job.start(switches)
    _, (model,) = built(PLAIN)
    losses = [job.per_token_loss(model, job.samples(2, seed=seed)).sum() for seed in range(3)]
    by_forward: dict[int, dict[str, Tensor]] = {}
    for index in order:
        losses[index].backward()
        by_forward[index] = gradients(model)
    assert in_use() == 0
    return [by_forward[index] for index in range(3)]


def without_backward(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Run forwards without backward; return their copies, and bytes in use after they are dropped."""
    job.start(switches)
    _, (model,) = built(PLAIN)
    tokens = job.samples(2)
    result = {}
    gc.collect()
    gc.disable()  # memory must be freed without the garbage collector
    try:
        with copies() as seen:
            with torch.no_grad():
                job.per_token_loss(model, tokens)
            result["no_grad"] = len(seen.out)
            job.per_token_loss(model.requires_grad_(False), tokens)
            result["frozen"] = len(seen.out)
            loss = job.per_token_loss(model.requires_grad_(True), tokens)
            result["dropped"] = len(seen.out)
            result["held"] = in_use()
            del loss
            result["left"] = in_use()
    finally:
        gc.enable()
    return result


def reported(switches: Mapping[str, Any]) -> list[str]:
    """Return the log lines of one forward of two samples."""
    from mindspeed_dsa import log

    job.start(switches)
    _, (model,) = built(PLAIN)
    log.forget()
    with redirect_stderr(io.StringIO()) as said:
        job.per_token_loss(model, job.samples(2))
    return said.getvalue().splitlines()


def twice(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Run two backwards through one graph."""
    job.start(switches)
    _, (model,) = built(PLAIN)
    total = logits(model, job.samples(2)).sum()
    total.backward(retain_graph=True)
    first = gradients(model)
    with copies() as seen:
        total.backward()
    second = gradients(model)
    return {"first": first, "second": second, "copies": len(seen.back), "left": in_use()}


def interrupted(switches: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Raise in the second layer, in or after its attention, and take a step after that."""
    job.start(switches)
    _, (model,) = built(PLAIN)
    layer = model.decoder.layers[1]
    broken = {"attention": layer.self_attention.linear_proj, "mlp": layer.mlp}[where]

    def fail(*_: Any) -> None:
        raise ZeroDivisionError(where)

    handle = broken.register_forward_pre_hook(fail)
    try:
        job.per_token_loss(model, job.samples(2))
    except ZeroDivisionError as error:
        raised = str(error)
    handle.remove()
    gc.collect()
    # No hooks may be left on autograd's stack of saved tensor hooks.
    left, hooked = in_use(), bool(torch._C._autograd._top_saved_tensors_default_hooks(True))
    job.per_token_loss(model, job.samples(2)).sum().backward()
    return {"raised": raised, "left": left, "hooked": hooked, "gradients": gradients(model)}


def timeline(switches: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return the order of copies, frees and layers in one forward and backward."""
    from mindspeed_dsa.features.memory.swap_attention import swapped_storage
    from mindspeed_dsa.features.memory.swap_attention.swapped_storage import SwappedStorage

    job.start(switches)
    _, (model,) = built({**PLAIN, "num_layers": num_layers})
    events: list[str] = []
    layer_of: dict[int, int] = {}  # by the address of the host buffer
    start, leave = swapped_storage._copy_behind_current, SwappedStorage.leave

    def note(what: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            # One event for all tensors of a layer.
            if events[-1:] != [what]:
                events.append(what)

        return hook

    def noting_copy(platform: Any, stream: Any, destination: Tensor, source: Tensor, timed: bool) -> Any:
        if source.data_ptr() in layer_of:
            note(f"back {layer_of[source.data_ptr()]}")()
        else:
            # Layers leave one after the other, so the number of freed layers is the number of this one.
            layer_of[destination.data_ptr()] = events.count("gone")
            note(f"out {events.count('gone')}")()
        return start(platform, stream, destination, source, timed)

    def noting_leave(self: Any) -> None:
        note("gone")()
        leave(self)

    for number, layer in enumerate(model.decoder.layers):
        for name, module in (("attention", layer.self_attention), ("mlp", layer.mlp)):
            module.register_forward_hook(note(f"{name} {number}"))
            module.register_full_backward_pre_hook(note(f"backward of {name} {number}"))
    with (
        mock.patch.object(swapped_storage, "_copy_behind_current", noting_copy),
        mock.patch.object(SwappedStorage, "leave", noting_leave),
    ):
        loss = job.per_token_loss(model, job.samples(2)).sum()
        loss.backward()
    return events


def fused_accumulation(switches: Mapping[str, Any], tp: int = 1) -> dict[str, Any]:
    """Return weight gradients that linear layers accumulate into ``main_grad``, and their reduction."""
    from megatron.core.tensor_parallel import layers

    def accumulate(rows: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad.addmm_(grad_output.flatten(0, -2).t(), rows.flatten(0, -2))

    job.start(switches, tp=tp)
    kernels = mock.Mock(wgrad_gemm_accum_fp32=accumulate)
    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
    ):
        cfg, chunks = built({**PLAIN, "gradient_accumulation_fusion": True}, tp=tp)
        job.train_step(cfg, chunks, list(job.samples(4).split(2)), ddp={"overlap_grad_reduce": True})
    return {"gradients": job.gradients(chunks)}


def transformer_engine_switch(switches: Mapping[str, Any], **before: bool) -> dict[str, Any]:
    """Return Transformer Engine's offload switch inside of attention, outside of it, and afterwards.

    Args:
        switches: feature switches.
        **before: initial attributes of the engine's module.
    """
    from megatron.core.extensions import transformer_engine

    job.start(switches)
    _, (model,) = built(PLAIN)
    layer = model.decoder.layers[0]
    engine = SimpleNamespace(**before)
    result: dict[str, Any] = {}
    for name, module in (("attention", layer.self_attention.linear_proj), ("mlp", layer.mlp)):
        module.register_forward_pre_hook(
            lambda *_, name=name: result.__setitem__(name, vars(engine).get("CPUOffloadEnabled"))
        )
    with mock.patch.object(transformer_engine, "cpu_offload", engine):
        job.per_token_loss(model, job.samples(2))
    return {**result, "left": vars(engine)}


def steps(
    switches: Mapping[str, Any], count: int, asynchronous: bool = True, room: float = 2.0**40
) -> list[dict[str, Any]]:
    """Take steps of two microbatches; return loss, gradients, copied bytes, peak host bytes and log."""
    # Each event is one tick of the fake clock after the previous one, so durations count events.
    from mindspeed_dsa import log
    from mindspeed_dsa.features.memory.swap_attention import hidden_copies
    from mindspeed_dsa.platforms import cpu
    from mindspeed_dsa.platforms.host_pool import HostPool

    job.start(switches)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    cfg, (model,) = built(PLAIN)
    clock, take = itertools.count(0.0), HostPool.take
    most = [0]

    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        buffer = take(self, *args, **kwargs)
        # Most bytes that the host held during a step.
        most.append(max(most.pop(), in_use()))
        return buffer

    results = []
    log.forget()
    with (
        redirect_stderr(io.StringIO()) as said,
        mock.patch.object(cpu.time, "perf_counter", side_effect=clock.__next__),
        mock.patch.object(cpu.CpuPlatform, "asynchronous", asynchronous),
        mock.patch.object(hidden_copies, "_room", return_value=room),
        mock.patch.object(HostPool, "take", taking),
    ):
        for step in range(count):
            most[:] = [0]
            with copies() as seen:
                losses = get_forward_backward_func()(
                    forward_step_func=partial(job.forward_step, cfg),
                    data_iterator=iter(job.samples(4, seed=step).split(2)),
                    model=model,
                    num_microbatches=2,
                    seq_length=job.SEQUENCE,
                    micro_batch_size=2,
                    forward_only=False,
                )
            result = {"losses": losses, "gradients": gradients(model), "most": most[0]}
            result["said"] = said.getvalue().splitlines()
            results.append({**result, "out": sum(seen.out), "back": sum(seen.back)})
    return results


def chosen_layers(switches: Mapping[str, Any], num_layers: int, **layout: Any) -> dict[int, tuple[str, ...]]:
    """Return this rank's layers that swap, with their swapped modules."""
    from mindspeed_dsa.features.memory.swap_attention import layer_pass as swap_layers

    job.start(switches, **layout)
    vpp = layout.get("vpp")
    _, chunks = built({**PLAIN, "num_layers": num_layers}, stages=vpp or 1, pp=layout.get("pp", 1))
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    swaps = {layer.layer_number: vars(layer).get(swap_layers._SWAPS) for layer in layers}
    return {number: modules.names for number, modules in swaps.items() if modules is not None}


def after_undo(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Run a model that outlives the feature."""
    import mindspeed_dsa

    job.start(switches)
    _, (model,) = built(PLAIN)
    mindspeed_dsa.disable()
    with mindspeed_dsa.enabled(**job.DSA_ON), copies() as seen:
        job.per_token_loss(model, job.samples(2)).sum().backward()
    return {"copies": len(seen.out), "gradients": gradients(model)}
