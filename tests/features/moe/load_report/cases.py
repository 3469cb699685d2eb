"""Training steps whose routers are counted twice: by the report, and by hooks that know nothing of it."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch

from mindspeed_dsa import session
from mindspeed_dsa.features.moe.load_report import steps as load_report
from tests.support import model

SWITCH = "moe_router_load_report"
LAYERS, SAMPLES = 4, 4


def train(
    folder: str = "",
    steps: int = 2,
    num_microbatches: int = 4,
    overrides: dict[str, Any] | None = None,
    evaluate: bool = False,
    switches: dict[str, Any] | None = None,
    mtp: bool = False,
    **layout: Any,
) -> list[dict[int, list[int]]]:
    """Steps of a model with three MoE layers, with a report in ``folder`` if one is named.

    Returns:
        For each step, tokens by layer and expert, as the routers of this rank sent them.
    """
    model.start({**(switches or {}), **({SWITCH: folder} if folder else {})}, **layout)
    running = session.current()
    assert running is not None
    context = running.contexts.get("moe-router-load-report")
    if context is not None:
        load_report.use_own_loop(context)
    from megatron.core import parallel_state

    tp, vpp = layout.get("tp", 1), layout.get("vpp")
    cfg = model.config(
        num_layers=LAYERS,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=layout.get("pp", 1),
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=layout.get("ep", 1),
        mtp_num_layers=1 if mtp else None,
        **(overrides or {}),
    )
    # As Megatron-LM has it: every chunk is built with a configuration of its own.
    chunks = [
        model.gpt_model(copy.copy(cfg) if stage else cfg, stage if vpp else None, mtp)
        for stage in range(vpp or 1)
    ]
    seen: dict[int, list[int]] = {}
    for chunk in chunks:
        watch(chunk, seen)
    found = []
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    for step in range(1, steps + 1):
        batch = model.samples(num_microbatches * SAMPLES, seed=step)
        mine = batch.view(num_microbatches, ranks, SAMPLES // ranks, -1)[:, rank]
        if evaluate:
            with torch.no_grad():
                model.per_token_loss(chunks[0], mine[0])
        seen.clear()
        model.train_step(cfg, chunks, list(mine))
        if context is not None:
            load_report.record_step(context, step)
        found.append(dict(seen))
    return found


def watch(chunk: Any, seen: dict[int, list[int]]) -> None:
    """Count the tokens of each router's experts, by the probabilities that are not zero."""
    layers = [(layer.layer_number, layer) for layer in chunk.decoder.layers]
    if getattr(chunk, "mtp", None) is not None:
        layers += [(LAYERS + each.layer_number, each) for each in chunk.mtp.layers]
    for number, layer in layers:
        for module in layer.modules():
            if type(module).__name__ == "TopKRouter":
                module.register_forward_hook(_counter(number, seen))


def _counter(number: int, seen: dict[int, list[int]]) -> Any:
    def count(router: Any, inputs: Any, output: Any) -> None:
        tokens = (output[0] != 0).sum(dim=0).tolist()
        before = seen.get(number, [0] * len(tokens))
        seen[number] = [a + b for a, b in zip(before, tokens, strict=True)]

    return count


def summed(ranks: list[list[dict[int, list[int]]]]) -> list[dict[int, list[int]]]:
    """What all ranks saw together, by step."""
    together: list[dict[int, list[int]]] = []
    for of_step in zip(*ranks, strict=True):
        total: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for seen in of_step:
            for layer, tokens in seen.items():
                total[layer] = [a + b for a, b in zip(total[layer], tokens, strict=True)]
        together.append(dict(sorted(total.items())))
    return together
