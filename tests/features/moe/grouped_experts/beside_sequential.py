"""Worker functions: grouped experts, and Megatron's sequential experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support import model, moe

ON = {"experimental_attention_variant": None, "moe_grouped_gemm": True}
ACTIVATIONS = {
    "swiglu": {},
    "fused swiglu": {"bias_activation_fusion": True},
    "geglu": {"activation_func": F.gelu},
    "gelu": {"activation_func": F.gelu, "gated_linear_unit": False},
    "probs on input": {
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
}


def pair(
    switches: Mapping[str, Any] | None = None, tp: int = 1, ep: int = 1, etp: int = 1, **overrides: Any
) -> tuple[Any, Any]:
    """Return the layer with grouped and with sequential experts, with the same weights."""
    model.start({**ON, **(switches or {})}, tp=tp, ep=ep, etp=etp)
    overrides = {"expert_tensor_parallel_size": etp, **overrides}
    grouped = moe.layer(moe.config(tp, ep, moe_grouped_gemm=True, **overrides))
    # The reference does not recompute.
    overrides.pop("recompute_granularity", None)
    return grouped, moe.layer(moe.config(tp, ep, **overrides))


def layers(rows: Sequence[int] = (6, 5), **arguments: Any) -> tuple[str, str]:
    """Compare several microbatches through both layers."""
    ours, theirs = pair(**arguments)
    dtype = arguments.get("params_dtype", torch.float32)
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    tp = arguments.get("tp", 1)
    inputs = [moe.tokens(count * tp, seed, dtype=dtype) for seed, count in enumerate(rows)]
    if tp > 1:
        # With sequence parallelism each rank has its part of the rows.
        inputs = [model.shard("", each, _part_of(each, tp)) for each in inputs]
    moe.assert_same(moe.train(ours, inputs), moe.train(theirs, inputs), rtol)
    return type(ours.experts).__name__, type(theirs.experts).__name__


def _part_of(whole: torch.Tensor, tp: int) -> Any:
    part = torch.nn.Parameter(whole.chunk(tp)[0])
    part.partition_dim = 0
    return part


def experts(
    tokens_per_expert: Sequence[int],
    activation: str = "swiglu",
    main_grad: torch.dtype | None = None,
    **arguments: Any,
) -> None:
    """Compare the expert modules with a given number of rows per expert, two forwards before the backwards.

    With ``main_grad``, the stacked weights have a gradient buffer, and Megatron's mark for gradients that are
    in the buffer already.
    """
    ours, theirs = pair(num_moe_experts=len(tokens_per_expert), **ACTIVATIONS[activation], **arguments)
    if main_grad is not None:
        for parameter in ours.parameters():
            # Starts at 1, so that overwriting differs from accumulating.
            parameter.main_grad = torch.full(parameter.shape, 1.0, dtype=main_grad)
            parameter.grad_added_to_main_grad = False
    activations = []
    if "recompute_modules" in arguments:
        function = ours.experts.config.activation_func
        ours.experts.config.activation_func = lambda rows: activations.append(len(rows)) or function(rows)
    results = [_train(built.experts, tokens_per_expert) for built in (ours, theirs)]
    assert len(activations) == (4 if "recompute_modules" in arguments else 0), "two of them, and again"
    dtype = arguments.get("params_dtype", torch.float32)
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    gradients = [moe.by_name(built, lambda parameter: parameter.grad) for built in (ours, theirs)]
    if main_grad is not None:
        assert all(parameter.grad_added_to_main_grad for parameter in ours.experts.parameters())
        placeholders = [parameter.grad for parameter in ours.experts.parameters()]
        assert all(placeholder is not None for placeholder in placeholders), "hooks wait for a gradient"
        gradients[0] = moe.by_name(ours, lambda parameter: parameter.main_grad - 1)
        # The router, which did not run, has a buffer too.
        gradients = [{n: g for n, g in by_name.items() if "local_experts" in n} for by_name in gradients]
    results = [{**result, "weights": grads} for result, grads in zip(results, gradients, strict=True)]
    assert len(gradients[1]) == 2 * len(tokens_per_expert)
    moe.assert_same(*results, rtol)
    for name, gradient in gradients[0].items():
        if tokens_per_expert[int(name.split(".")[2])] == 0:
            assert not gradient.count_nonzero(), f"{name} has no tokens"


def _train(module: Any, tokens_per_expert: Sequence[int]) -> dict[str, Any]:
    rows = sum(tokens_per_expert)
    dtype = next(module.parameters()).dtype
    inputs = [moe.tokens(rows, seed, 1, dtype)[:, 0].clone().requires_grad_() for seed in (0, 1)]
    probs = [torch.rand(rows, generator=torch.Generator().manual_seed(7)).requires_grad_() for _ in inputs]
    counts = torch.tensor(tokens_per_expert)
    # Both forwards come before the first backward, as in a pipeline.
    outputs = [module(rows_in, counts, prob)[0] for rows_in, prob in zip(inputs, probs, strict=True)]
    for output in outputs:
        noise = torch.Generator().manual_seed(8)
        output.backward(torch.randn(output.shape, generator=noise).to(dtype))
    leaves = [*inputs, *probs]
    return {"outputs": [each.detach() for each in outputs], "inputs": [each.grad for each in leaves]}


def initial_weights(cpu_initialization: bool, **arguments: Any) -> None:
    """Check that fresh modules of both kinds have the same weights and leave the same random states."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.spec_utils import build_module

    model.start({**ON, **arguments.pop("switches", {})}, ep=arguments.get("ep", 1))
    drawn = []
    for grouped in (True, False):
        cfg = moe.config(moe_grouped_gemm=grouped, use_cpu_initialization=cpu_initialization, **arguments)
        random.model_parallel_cuda_manual_seed(77)
        torch.manual_seed(3)
        spec = get_gpt_layer_local_spec(cfg.num_moe_experts, moe_grouped_gemm=grouped)
        built = build_module(spec.submodules.mlp, config=cfg)
        drawn.append((moe.by_name(built, torch.Tensor.detach), torch.rand(1)))
    (ours, ours_next), (theirs, theirs_next) = drawn
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
    # The next random number shows whether both kinds drew equally many.
    assert torch.equal(ours_next, theirs_next)


def state_dicts(**arguments: Any) -> None:
    """Check that both kinds have the same state dict, load each other's, and do not share loaded memory."""
    ours, theirs = pair(**arguments)
    mine, stock = ours.state_dict(), theirs.state_dict()
    names = {name for name, value in stock.items() if value is not None}
    assert {name for name, value in mine.items() if value is not None} == names
    # These differ from the current weights, so that an entry that is not loaded is noticed.
    changed = {name: None if value is None else value + 1 for name, value in stock.items()}
    ours.load_state_dict(changed)
    for name in names:
        assert torch.equal(ours.state_dict()[name], changed[name]), name
    theirs.load_state_dict({name: value + 1 for name, value in ours.state_dict().items() if name in names})
    for name in names:
        assert torch.equal(theirs.state_dict()[name], changed[name] + 1), name
    stack = ours.experts.mlp.linear_fc1.weight
    assert stack.is_contiguous()
    assert ours.state_dict(keep_vars=True)["experts.mlp.linear_fc1.weight"] is stack
    assert isinstance(stack, torch.nn.Parameter)


def overlapped(**arguments: Any) -> int:
    """Compare both layers under overlapped all-to-alls; return the number of deferred stacked gradients."""
    from mindspeed_dsa.parallel.weight_gradients import DeferredGradient

    waiting: list[int] = []
    defer = DeferredGradient.defer

    def counted(self: Any, *arguments: Any) -> torch.Tensor:
        waiting.append(self.weight.dim())
        return defer(self, *arguments)

    with mock.patch.object(DeferredGradient, "defer", counted):
        layers(switches={"moe_alltoall_overlap_comm": True}, **arguments)
    # Stacked weights have three dimensions.
    return waiting.count(3)


def placed(file: str, order: Sequence[int]) -> list[tuple[int, ...]]:
    """Compare grouped experts in other slots with stock's, and check that they are saved by expert number.

    Returns:
        the experts of each rank.
    """
    from mindspeed_dsa import session
    from mindspeed_dsa.features.moe import numbering
    from mindspeed_dsa.features.moe.expert_placement import placing

    ours, theirs = pair({"moe_expert_placement": file}, ep=2)
    running = session.current()
    assert running is not None
    placing.move(ours, order, running.contexts["moe-expert-placement"])
    inputs = [moe.tokens(6, dist.get_rank())]
    mine, stock = (moe.train(built, inputs) for built in (ours, theirs))
    moe.assert_same(*({**each, "weights": {}} for each in (mine, stock)))
    for metadata in ({}, {"singleton_local_shards": True}):
        saved = [_shards(built.experts, metadata) for built in (ours, theirs)]
        assert saved[0].keys() == saved[1].keys()
        for place, data in saved[1].items():
            assert torch.equal(saved[0][place], data), place
    held: list[Any] = [None] * 2
    dist.all_gather_object(held, numbering.experts_of(ours.experts, dist.get_rank()))
    return held


def _shards(module: Any, metadata: Mapping[str, Any]) -> dict[Any, torch.Tensor]:
    """Return the shards that all ranks would save, by key and offset, after a pipeline stage renames
    layers.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding

    state = module.sharded_state_dict("here.", metadata={**metadata})
    replace_prefix_for_sharding(state, "here.", "there.")
    apply_factories(state)
    shards = [each for each in nested_values(state) if isinstance(each, ShardedTensor)]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {(s.key, s.global_offset): s.data.clone() for s in shards})
    return {place: data for part in everywhere for place, data in part.items()}


def flat_pieces(**arguments: Any) -> None:
    """Check that flat shards of a stack, cut through experts and gates, equal single experts' shards."""
    from dataclasses import replace

    ours, theirs = pair(**arguments)
    linears = ("linear_fc1", "linear_fc2")
    stock: dict[Any, list[Any]] = {}
    for name, item in theirs.experts.sharded_state_dict().items():
        if name.endswith("weight"):
            size = item.data.numel()
            _collect(stock, replace(item, data=item.data.flatten(), flattened_range=slice(0, size)))
    mine: dict[Any, list[Any]] = {}
    entries = ours.experts.sharded_state_dict()
    for name in linears:
        factory, flat = (
            entries[f"mlp.{name}.weight"],
            getattr(ours.experts.mlp, name).weight.detach().flatten(),
        )
        # Cuts inside experts and inside a gate, as the distributed optimizer makes them.
        bounds = [0, 7, flat.numel() // 2 + 5, flat.numel() - 3, flat.numel()]
        for start, stop in pairwise(bounds):
            piece = replace(factory, data=flat[start:stop], flattened_range=slice(start, stop))
            built = _collect(mine, piece)
            assert torch.equal(piece.merge_fn(_data(built)), flat[start:stop])
    assert mine.keys() == stock.keys()
    for place, parts in stock.items():
        # Pieces of an expert, in order, make its whole weight.
        wholes = [torch.cat([data for _, data in sorted(each, key=_start)]) for each in (parts, mine[place])]
        assert torch.equal(*wholes), place


def _start(part: tuple[int, torch.Tensor]) -> int:
    return part[0]


def _collect(into: dict[Any, list[Any]], item: Any) -> Any:
    built = item.build() if hasattr(item, "build") else item
    flat = [built]
    # Flattens nested dicts and lists of shards.
    while any(isinstance(entry, (dict, list)) for entry in flat):
        flat = [
            inner
            for entry in flat
            for inner in (
                entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else [entry]
            )
        ]
    for shard in flat:
        place = shard.key, shard.global_offset
        into.setdefault(place, []).append((shard.flattened_range.start, shard.data))
    return built


def _data(built: Any) -> Any:
    if isinstance(built, dict):
        return {name: _data(each) for name, each in built.items()}
    return [_data(each) for each in built] if isinstance(built, list) else built.data
