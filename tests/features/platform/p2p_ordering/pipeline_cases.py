"""Worker functions of ``test_transfers.py``."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_dsa
from mindspeed_dsa.feature import Context
from tests.support import contexts

_ELEMENTS = 1 << 14  # 64 KiB: allocated from the heap, so the next tensor of that size reuses the memory
_PATIENCE = datetime.timedelta(seconds=60)
_MICROBATCHES, _BATCH, _SEQUENCE, _VOCABULARY, _LAYERS, _STEPS = 8, 2, 16, 64, 8, 3


@contextlib.contextmanager
def platform(repaired: bool) -> Iterator[Context[Any]]:
    """Use the CPU platform, with Megatron's own P2P functions unless ``repaired``."""
    from mindspeed_dsa.features.platform.cpu.feature import CPU, P2P_ORDERING
    from mindspeed_dsa.patches import Claim, PatchManager

    manager = PatchManager()
    context = contexts.context(CPU.name)
    # Megatron's own functions remain if the repairs are left out.
    manager.plan(
        Claim(CPU.name, patch, 0, context) for patch in CPU.patches if repaired or patch not in P2P_ORDERING
    )
    manager.check()
    manager.arm()
    try:
        yield context
    finally:
        manager.undo()


def _p2p(name: str, **tensors: torch.Tensor | None) -> Any:
    """Call Megatron's ``_p2p_ops`` or ``_batched_p2p_ops`` between two ranks."""
    from megatron.core.pipeline_parallel import p2p_communication

    names = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
    # With two ranks, the other one is both neighbours.
    other = 1 - dist.get_rank()
    return getattr(p2p_communication, name)(
        **{each: tensors.get(each) for each in names},
        group=dist.group.WORLD,
        prev_pipeline_rank=other,
        next_pipeline_rank=other,
    )


def send_then_free(repaired: bool) -> float | None:
    """Send sevens from rank 0 and free the tensor as the schedule does; rank 1 receives later.

    Returns:
        on rank 1, the share of received elements that are seven.
    """
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    with platform(repaired):
        if dist.get_rank() == 0:
            # The same value everywhere, so that other memory is recognised.
            activation = torch.full((_ELEMENTS,), 7.0)
            work = _p2p("_p2p_ops", tensor_send_next=activation)["send_next"]
            deallocate_output_tensor(activation, deallocate_pipeline_outputs=True)
            others = [torch.full((_ELEMENTS,), -1.0) for _ in range(4)]  # tensors of the next microbatch
            # Rank 1 receives only after the tensor was freed.
            dist.barrier()
            work.wait()
            assert all(torch.equal(other, torch.full_like(other, -1.0)) for other in others)
            return None
        dist.barrier()
        received = torch.zeros(_ELEMENTS)
        _p2p("_p2p_ops", tensor_recv_prev=received)["recv_prev"].wait()
        return float((received == 7.0).float().mean())


def exchange_both_ways(repaired: bool) -> tuple[float, float]:
    """Send an activation (10 + rank) forward and a gradient (20 + rank) back in one batch, on both ranks.

    Returns:
        the received activation and gradient.
    """
    with platform(repaired):
        rank = dist.get_rank()
        activation, gradient = torch.zeros(4), torch.zeros(4)
        works = _p2p(
            "_batched_p2p_ops",
            tensor_send_prev=torch.full((4,), 20.0 + rank),
            tensor_recv_prev=activation,
            tensor_send_next=torch.full((4,), 10.0 + rank),
            tensor_recv_next=gradient,
        )
        assert len(works) == 4
        for work in works:
            work.wait()
        return activation[0].item(), gradient[0].item()


def forget_a_send() -> float | None:
    """Drop a send's handle on rank 0 and leave the schedule; rank 1 receives afterwards."""
    from mindspeed_dsa.features.platform.cpu.gloo import Sends, complete_sends

    def schedule() -> None:
        _p2p("_p2p_ops", tensor_send_next=torch.full((4,), 5.0))["send_next"].wait()
        _p2p("_p2p_ops", tensor_send_next=torch.full((_ELEMENTS,), 7.0))
        assert len(context.state(Sends)) == 1  # the send that was waited for is not kept

    with platform(repaired=True) as context:
        if dist.get_rank() == 0:
            complete_sends(schedule, context)()
            assert not context.state(Sends)
            return None
        first, second = torch.zeros(4), torch.zeros(_ELEMENTS)
        _p2p("_p2p_ops", tensor_recv_prev=first)["recv_prev"].wait(_PATIENCE)
        _p2p("_p2p_ops", tensor_recv_prev=second)["recv_prev"].wait(_PATIENCE)
        return second.mean().item()


# -- whole pipelines -----------------------------------------------------------------------------


def train(pipeline: int, chunks: int | None, overlap: bool, evaluate: bool = False) -> dict[str, Any]:
    """Train a small GPT model for a few steps; weights depend on their names, data on the step.

    Args:
        pipeline: pipeline parallel size; the remaining ranks repeat the same data.
        chunks: number of model chunks per rank, ``None`` for a plain pipeline.
        overlap: whether P2P transfers are overlapped.
        evaluate: whether the run ends with a forward-only pass.

    Returns:
        ``losses`` and ``grad_norms`` per step (of the complete model, the same on every rank), this rank's
        ``weights`` by global name, and the ``evaluation`` loss.
    """
    from megatron.core import parallel_state

    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        parallel_state.initialize_model_parallel(1, pipeline, chunks)
        try:
            model = _build(pipeline, chunks, overlap)
            mindspeed_dsa.finalize()
            weights = {_global_name(part, name): p for part in model for name, p in part.named_parameters()}
            optimizer = torch.optim.SGD(weights.values(), lr=0.5)
            results: dict[str, Any] = {"losses": [], "grad_norms": []}
            for step in range(_STEPS):
                optimizer.zero_grad()
                loss = _run_schedule(model, step)
                # Each stage has its part of the sum of squares.
                squares = sum((p.grad.double() ** 2).sum() for p in weights.values())
                totals = torch.stack([loss, squares])
                dist.all_reduce(totals, group=parallel_state.get_pipeline_model_parallel_group())
                results["losses"].append(totals[0].item())
                results["grad_norms"].append(totals[1].sqrt().item())
                optimizer.step()
            if evaluate:
                loss = _run_schedule(model, _STEPS, forward_only=True)
                dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
                results["evaluation"] = loss.item()
            results["weights"] = {name: p.detach().clone() for name, p in weights.items()}
            return results
        finally:
            parallel_state.destroy_model_parallel()


def _build(pipeline: int, chunks: int | None, overlap: bool) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=_LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
        deallocate_pipeline_outputs=True,
    )
    model = []
    for stage in range(chunks or 1):
        where = {"ignore_virtual": False, "vp_stage": stage}
        part = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=_VOCABULARY,
            max_sequence_length=_SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=False,
            vp_stage=stage if chunks else None,
        )
        for name, parameter in part.named_parameters():
            # Norm weights and biases are equal in all layouts already.
            if parameter.dim() > 1:
                _fill(parameter, _global_name(part, name))
        model.append(part)
    return model


def _global_name(part: Any, name: str) -> str:
    """Return a parameter's name with the layer's number in the complete model."""
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(part.decoder.layers[int(words[2])].layer_number)
    return ".".join(words)


def _fill(parameter: torch.Tensor, name: str) -> None:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        parameter.copy_(0.05 * values)


def _run_schedule(model: list[Any], step: int, forward_only: bool = False) -> torch.Tensor:
    """Run one pass over all microbatches; return the mean loss on the last stage, 0 elsewhere (float64)."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    generator = torch.Generator().manual_seed(step)
    shape = (_BATCH, _SEQUENCE + 1)
    data = [torch.randint(0, _VOCABULARY, shape, generator=generator) for _ in range(_MICROBATCHES)]

    def forward_step(batches: Iterator[torch.Tensor], part: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens = next(batches)  # [batch, sequence + 1]
        positions = torch.arange(_SEQUENCE).expand(_BATCH, -1)
        output = part(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    reduced = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(data) for _ in model] if len(model) > 1 else iter(data),
        model=model if len(model) > 1 else model[0],
        num_microbatches=_MICROBATCHES,
        seq_length=_SEQUENCE,
        micro_batch_size=_BATCH,
        forward_only=forward_only,
    )
    # Only the last stage has losses.
    losses = [each["loss"].double() for each in reduced]
    return torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float64)
