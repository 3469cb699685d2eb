"""Events that prove a feature's work during a job; a feature that does nothing would pass as exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

EVENTS = {
    "reuse-fp32-param": "weights in master form",
    "recompute-activation-function": "activation functions recomputed",
    "recompute-norm": "norms recomputed",
    "swap-attention": "storages moved to the host",
    "swap-optimizer": "chunks updated",
    "virtual-optimizer": "steps with moments on the host",
}
"""Events that must be counted where a feature is on, and nowhere else."""

CHUNKED = "rows gathered in chunks"
"""Event of overlapped tensor parallel communication with sequence parallelism."""
CHUNKED_SUM = "sums reduced in chunks"
"""Event of overlapped tensor parallel communication without sequence parallelism."""
MEASURED = "numbers of chunks measured"
"""Event of a number of chunks that is chosen automatically."""
STARTED = "all-to-alls started"
"""Event of the experts' all-to-alls."""
ATTENDED = "halves that attended"
"""Event of layers that are split before attention."""
MOVED = "experts moved to their tokens"
"""Event of experts that are computed where their tokens are."""
GROUPED = "grouped matmuls"
"""Event of experts with stacked weights."""
PERMUTED = "fused permutations"
"""Event of tokens that our operator permutes."""
PLACED = "routing maps in the order of slots"
"""Event of experts that are not in their own slots."""
COUNTED = "routing maps counted"
"""Event of the report of the experts' load."""
GATHERED = "gathers of units' weights"
"""Event of weights that FSDP2 shards."""
EXPERTS_GATHERED = "gathers of units' experts"
"""Event of experts that FSDP2 shards."""
FUSED_OPERATORS = {
    "rmsnorm": "fused norms",
    "rotary-pos-emb": "fused rotations",
    "swiglu": "fused activations",
    "mask-arithmetic": "fills by mask",
}
"""Events of the fused operators."""
CHUNKS_OF_LOGITS = "losses in chunks of tokens"
"""Event of losses that are computed together with the output projection."""
WIDER = "norms with wider weights"
"""Event of norms with weights in fp32."""
REGIONS = "regions run compiled"
"""Event of compiled parts of a layer."""
BESIDE = "started on the second stream"
"""Event of work that runs concurrently with the rest of a layer."""
AWAITED = "awaited from the second stream"
"""Event of uses of that work's results."""
TAKEN = "projections found by indexers"
"""Event of projections that an indexer does not compute itself."""
WAITED = "weight gradients that waited"
"""Event of backwards that defer their weight gradients, by chunk and microbatch."""
HANDED_ON = "results handed on along a V"
"""Event of results passed on in DualPipeV's schedule."""
HELD = "experts held"
"""Count of experts in all layers of all ranks, in any job; an expert sliced over two ranks counts twice."""

CAUSES: dict[str, tuple[str, ...]] = {
    **{event: (feature.replace("-", "_"),) for feature, event in EVENTS.items()},
    **dict.fromkeys(FUSED_OPERATORS.values(), ("fused_operators",)),
    CHUNKED: ("coc_parallel_num", "use_ascend_coc"),
    CHUNKED_SUM: ("coc_parallel_num", "use_ascend_coc"),
    MEASURED: ("use_ascend_coc",),
    STARTED: ("moe_alltoall_overlap_comm", "moe_batch_overlap", "moe_fb_overlap"),
    ATTENDED: ("moe_batch_overlap_attention",),
    MOVED: ("balanced_moe_experts",),
    GROUPED: ("moe_grouped_gemm",),
    PERMUTED: ("moe_permute_fusion",),
    GATHERED: ("use_torch_fsdp2",),
    EXPERTS_GATHERED: ("fsdp2_shard_experts",),
    CHUNKS_OF_LOGITS: ("fused_linear_cross_entropy",),
    WIDER: ("init_norm_weight_in_fp32",),
    REGIONS: ("compile_regions",),
    BESIDE: ("two_streams",),
    AWAITED: ("two_streams",),
    TAKEN: ("two_streams",),
    WAITED: ("split_backward", "dualpipev_dw_detach"),
    HANDED_ON: ("schedules_method",),
}
"""Switches, any of which makes an event happen."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count :data:`EVENTS` and the names above."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    from mindspeed_dsa.features.compilation.regions.region import Region
    from mindspeed_dsa.features.memory.recompute_outputs.checkpoint import _Output
    from mindspeed_dsa.features.memory.reuse_fp32_param.shared_weights import Masters
    from mindspeed_dsa.features.memory.swap_attention.swapped_storage import SwappedStorage
    from mindspeed_dsa.features.moe.balanced_experts import layer as balanced
    from mindspeed_dsa.features.moe.batch_overlap.stages import Stages
    from mindspeed_dsa.features.moe.expert_placement.placing import _Columns
    from mindspeed_dsa.features.moe.load_report.steps import Counts
    from mindspeed_dsa.features.operators.fused import functions
    from mindspeed_dsa.features.pipeline import waiting_gradients
    from mindspeed_dsa.features.pipeline.dualpipev.transfers import Transfers
    from mindspeed_dsa.features.tensor_parallel.overlap import chunked, tuning
    from mindspeed_dsa.megatron import local_modules, second_stream
    from mindspeed_dsa.ops.grouped_matmul.backends import Cpu as grouped
    from mindspeed_dsa.ops.linear_cross_entropy.backends import Cpu as loss
    from mindspeed_dsa.ops.moe_permute.backends import Cpu as permutation
    from mindspeed_dsa.ops.rms_norm.backends import Cpu as norm
    from mindspeed_dsa.ops.rotary.backends import Cpu as rotary
    from mindspeed_dsa.ops.swiglu.backends import Cpu as activation
    from mindspeed_dsa.optimizers.moments import Moments
    from mindspeed_dsa.optimizers.step_pipeline import Pipeline
    from mindspeed_dsa.parallel.all_to_all import InFlight

    counts: Counter[str] = Counter()

    def counting(holder: type, name: str, event: Callable[..., str]) -> Any:
        original = getattr(holder, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[event(*args)] += 1
            return original(self, *args, **kwargs)

        return mock.patch.object(holder, name, call)

    normalize = local_modules.normalize

    def normalized(norm: Any, states: Any, weight: Any, *rest: Any) -> Any:
        counts[WIDER] += weight.dtype != states.dtype
        return normalize(norm, states, weight, *rest)

    gather, reduce, measure = chunked.Gather.__init__, chunked.matmul_reduce, tuning._measure
    choose = balanced.choose

    build = MoELayer.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        counts[HELD] += self.num_local_experts

    def counting_calls(module: Any, name: str, event: str) -> Any:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[event] += 1
            return original(*args, **kwargs)

        return mock.patch.object(module, name, call)

    def gathered(self: Any, *args: Any, **kwargs: Any) -> None:
        gather(self, *args, **kwargs)
        counts[CHUNKED] += len(self._works) > 1

    def reduced(*args: Any, **kwargs: Any) -> Any:
        pending = reduce(*args, **kwargs)
        counts[CHUNKED_SUM] += len(pending.works) > 1
        return pending

    def measured(*args: Any) -> dict[int, float]:
        measure(*args)
        counts[MEASURED] += 1
        # Several chunks everywhere: at the sizes of tests the fastest way would often be stock's.
        return {1: 1.0, 2: 0.8, 4: 0.5, 8: 0.8}

    def chosen(*args: Any) -> Any:
        plan = choose(*args)
        counts[MOVED] += len(plan.experts)
        return plan

    gather_unit = _fsdp_param_group.foreach_all_gather

    def gathered_unit(parameters: Any, *args: Any) -> Any:
        counts[GATHERED] += 1
        counts[EXPERTS_GATHERED] += any(".experts." in each._param_fqn for each in parameters)
        return gather_unit(parameters, *args)

    def refilled(_: Any, where: str) -> str:
        kind = "activation-function" if "activation function" in where else "norm"
        return EVENTS[f"recompute-{kind}"]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(chunked.Gather, "__init__", gathered))
        stack.enter_context(mock.patch.object(chunked, "matmul_reduce", reduced))
        stack.enter_context(mock.patch.object(tuning, "_measure", measured))
        stack.enter_context(mock.patch.object(balanced, "choose", chosen))
        stack.enter_context(mock.patch.object(local_modules, "normalize", normalized))
        stack.enter_context(counting_calls(grouped, "multiply", GROUPED))
        stack.enter_context(counting_calls(permutation, "permute", PERMUTED))
        stack.enter_context(mock.patch.object(_fsdp_param_group, "foreach_all_gather", gathered_unit))
        for module, function, operator in (
            (norm, "forward", "rmsnorm"),
            (rotary, "forward", "rotary-pos-emb"),
            (activation, "forward", "swiglu"),
            (functions, "_mask_of", "mask-arithmetic"),
        ):
            stack.enter_context(counting_calls(module, function, FUSED_OPERATORS[operator]))
        stack.enter_context(counting_calls(loss, "losses_and_gradients", CHUNKS_OF_LOGITS))
        stack.enter_context(counting_calls(_Columns, "forward", PLACED))
        stack.enter_context(counting(Counts, "add", lambda *_: COUNTED))
        stack.enter_context(mock.patch.object(MoELayer, "__init__", built))
        stack.enter_context(counting(_Output, "refill", refilled))
        stack.enter_context(counting(Region, "__call__", lambda *_: REGIONS))
        stack.enter_context(counting_calls(second_stream, "start", BESIDE))
        stack.enter_context(counting(second_stream.Started, "wait", lambda *_: AWAITED))
        stack.enter_context(counting_calls(second_stream, "view_with_projected", TAKEN))
        stack.enter_context(counting_calls(waiting_gradients, "_taken_out", WAITED))
        stack.enter_context(counting(Transfers, "hand_on", lambda *_: HANDED_ON))
        stack.enter_context(counting(InFlight, "send", lambda *_: STARTED))
        stack.enter_context(counting(Stages, "attend", lambda *_: ATTENDED))
        for holder, name, feature in (
            (Masters, "to_master", "reuse-fp32-param"),
            (SwappedStorage, "leave", "swap-attention"),
            (Pipeline, "_update", "swap-optimizer"),
            (Moments, "begin_step", "virtual-optimizer"),
        ):
            stack.enter_context(counting(holder, name, lambda *_, feature=feature: EVENTS[feature]))
        yield counts
