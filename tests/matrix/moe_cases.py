"""A MoE layer of any release, with and without a feature; runs inside the pool's workers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version

from tests.features.moe.alltoall_overlap.cases import SWITCH, recorded
from tests.features.moe.balanced_experts.cases import ALWAYS, watched
from tests.matrix.model import EXPERTS, one_step
from tests.support import model, moe
from tests.support.counting import counted


def overlapped(runs: Mapping[str, Mapping[str, Any]], switch: Mapping[str, Any] = SWITCH) -> dict[str, Any]:
    """Results of two microbatches with overlapped all-to-alls, and how many transfers were started.

    Args:
        runs: overrides of the configuration, by name.
        switch: what is switched on.
    """
    found: dict[str, Any] = {}
    for name, pair in _beside_stock(switch, runs, recorded).items():
        found[name] = {**pair, "launched": pair["watched"].count("launch")}
    return found


def balanced(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same with hot experts that are moved, and the plans."""
    found: dict[str, Any] = {}
    for name, pair in _beside_stock(ALWAYS, runs, _planned).items():
        found[name] = {**pair, "plans": pair["watched"]["plans"]}
    return found


@contextlib.contextmanager
def _planned() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {"plans": [], "dispatched": [], "counts": [], "sent": 0}
    with watched(found):
        yield found


def _beside_stock(
    switches: Mapping[str, Any],
    runs: Mapping[str, Mapping[str, Any]],
    watch: Callable[[], AbstractContextManager[Any]],
) -> dict[str, dict[str, Any]]:
    import mindspeed_dsa

    mindspeed_dsa.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    theirs = {name: _train(overrides) for name, overrides in runs.items()}
    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**switches)
    found: dict[str, dict[str, Any]] = {}
    for name, overrides in runs.items():
        with watch() as seen:
            ours = _train(overrides)
        found[name] = {"ours": ours, "theirs": theirs[name], "watched": seen}
    return found


def _train(overrides: Mapping[str, Any]) -> dict[str, Any]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": moe.HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": 16,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "bias_activation_fusion": False,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    built = moe.layer(TransformerConfig(**{**values, **overrides}))
    return moe.train(built, [moe.tokens(6, seed=10 * dist.get_rank() + index) for index in range(2)])


def whole_step(overrides: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """A training step of the tiny model, and how many parted transfers were started."""
    with recorded() as events:
        if Version(metadata.version("megatron-core")) < Version("0.16"):
            overrides = {**EXPERTS, "expert_model_parallel_size": arguments["ep"], **overrides}
            result = one_step(overrides=overrides, **arguments)
        else:
            result = model.run(overrides=overrides, **arguments)
    return {**result, "launched": events.count("launch")}


def permutations(overrides: Mapping[str, Any], **step: Any) -> dict[str, Any]:
    """A training step, and how often Megatron's permutations called our operator."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from mindspeed_dsa.features.moe.permute_fusion import permutation

    # Releases with a specification for DSA choose its modules by this field.
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    local = {"transformer_impl": "local"} if "transformer_impl" in fields else {}
    with counted(permutation, "permute", "unpermute", "sort_chunks") as calls:
        result = one_step(overrides={**overrides, **local}, **step)
    return {**result, "calls": dict(calls)}
