"""Expert load: counted on the device at each router, and written once per step.

Megatron-LM's training loop writes the records. A job with its own loop calls :func:`use_own_loop` and
:func:`record_step`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.context_parallel.layout import data_rows
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe import numbering
from mindspeed_dsa.features.moe.load_report.feature import Options
from mindspeed_dsa.features.moe.numbering import Numbered
from mindspeed_dsa.megatron.expert_parallel import CONTINUES
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.runs import expert_load, metrics
from mindspeed_dsa.runs.expert_load import LayerLoad


def use_own_loop(context: Context[Options]) -> None:
    """Declare that the job calls :func:`record_step` itself. Call before the model is built."""
    counts_of(context).own_loop = True


def record_step(context: Context[Options], step: int, writer: Any = None) -> None:
    """Write the record of the step just completed. Collective over all ranks.

    Args:
        context: the session's ``session.contexts["moe-router-load-report"]``.
        step: the step's number, from 1.
        writer: TensorBoard ``SummaryWriter`` on the last rank, or ``None``.
    """
    layers = counts_of(context).take()
    if not layers:
        return
    record = expert_load.record(step, layers)
    metrics.append_or_warn(context.options.folder / expert_load.FILE, record, context.log)
    if writer is not None:
        _show(writer, step, record)


def _show(writer: Any, step: int, record: metrics.Record) -> None:
    for layer in record["layers"]:
        group = f"moe load/layer {layer['layer']}"
        writer.add_scalar(f"{group} rank imbalance", layer["rank_imbalance"], step)
        writer.add_scalar(f"{group} expert imbalance", layer["expert_imbalance"], step)
        # One histogram per layer over all experts, scaled to a mean load of 1 to make layers comparable.
        mean = max(sum(layer["experts"]), 1) / len(layer["experts"])
        writer.add_histogram(f"{group} experts", torch.tensor(layer["experts"]) / mean, step)
    for stage in record["stages"]:
        writer.add_scalar(f"moe load/stage {stage['stage']} imbalance", stage["imbalance"], step)


def record_after_log(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``training_log``: record each step after it is logged."""

    def training_log(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # The position of `iteration` differs between releases; its name does not.
        step = int(inspect.signature(original).bind(*args, **kwargs).arguments["iteration"])
        variables = context.megatron("training.global_vars")
        job, writer = variables.get_args(), variables.get_tensorboard_writer()
        due = writer is not None and step % job.tensorboard_log_interval == 0
        record_step(context, step, writer if due else None)
        return result

    return training_log


def require_loop(context: Context[Options]) -> None:
    """Check that a training loop calls :func:`record_step`.

    Raises:
        MindSpeedDSAError: the job does not use Megatron-LM's training loop and did not call
            :func:`use_own_loop`.
    """
    has_loop = f"{context.megatron.root}.training.training" in sys.modules
    if not has_loop and not counts_of(context).own_loop:
        raise MindSpeedDSAError(
            f"mindspeed_dsa: {context.feature}: --moe-router-load-report records steps of Megatron-LM's own "
            "training loop (megatron.training), and this job does not use it; call use_own_loop and "
            f"record_step of {__name__} in the job's own loop, or omit the flag"
        )


# -- counts --------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Position of a router: layer number from 1, pipeline stage from 0."""

    layer: int
    stage: int


class Counts:
    """Counts of the tokens that this rank's routers have sent to each expert in the current step.

    Attributes:
        own_loop: whether the job calls :func:`record_step` itself.
    """

    def __init__(self, context: Context[Options]) -> None:
        self._megatron = context.megatron
        self._config: Any = None
        self._places: WeakKeyDictionary[Any, _Place] = WeakKeyDictionary()
        self._tokens: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
        self._microbatches: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
        self._slots: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
        self.own_loop = False

    def built(self, config: Any, layers: Sequence[Numbered]) -> None:
        """Register the MoE layers of a new model chunk.

        Args:
            config: Megatron configuration of the chunk.
            layers: MoE layers of the chunk.
        """
        self._config = config
        # Routers registered under the same numbers belong to an earlier model.
        numbers = {number for number, _ in layers}
        for router, place in list(self._places.items()):
            if place.layer in numbers or place.layer > self._layers:
                del self._places[router]
        stage = self._megatron("core.parallel_state").get_pipeline_model_parallel_rank()
        for number, layer in layers:
            self._places[layer.router] = _Place(number, stage)

    def add(self, router: Any, routing_map: Tensor) -> None:
        """Add a microbatch, or half of one, to the counts, on the device and without synchronization.

        Args:
            router: Megatron's router.
            routing_map: routed experts of each token, bool ``[tokens, experts]``.
        """
        with torch.no_grad():
            # Updated in place and allocated once, because CUDA graphs replay this addition.
            tokens = self._tokens.get(router)
            if tokens is None:
                tokens = torch.zeros(routing_map.size(1), dtype=torch.int64, device=routing_map.device)
                self._tokens[router] = tokens
                self._microbatches[router] = tokens.new_zeros(())
                if (order := numbering.order_of(router)) is not None:
                    self._slots[router] = torch.tensor(order, device=routing_map.device)
            tokens += routing_map.sum(dim=0)
            if not getattr(router, CONTINUES, False):
                self._microbatches[router] += 1

    def take(self) -> list[LayerLoad]:
        """Sum the counts of this step over all ranks, and reset them. Collective over all ranks.

        Returns:
            Loads of all MoE layers in order of layer number, on the last rank; an empty list on other ranks.
            Only the last rank synchronizes with its device.
        """
        if self._config is None:
            return []
        sums = self._sums()
        dist.all_reduce(sums.all)
        if dist.get_rank() != dist.get_world_size() - 1:
            return []
        stages, experts, ranks = sums.stages.tolist(), sums.experts.tolist(), sums.ranks.tolist()
        microbatches = sums.microbatches.tolist()
        return [
            LayerLoad(row + 1, stage - 1, experts[row], ranks[row], microbatches[row])
            for row, stage in enumerate(stages)
            if stage  # 0 for a dense layer
        ]

    @property
    def _layers(self) -> int:
        """Number of layers of the model, including MTP layers."""
        layers: int = self._config.num_layers + (self._config.mtp_num_layers or 0)
        return layers

    def _sums(self) -> _Sums:
        state = self._megatron("core.parallel_state")
        ranks = state.get_expert_model_parallel_world_size()
        replica = state.get_expert_data_parallel_rank()
        sums = _Sums(
            self._layers, self._config.num_moe_experts, state.get_expert_data_parallel_world_size(), ranks
        )
        # One rank per pipeline stage.
        alone = state.get_tensor_model_parallel_rank() == 0 and (
            state.get_data_parallel_rank(with_context_parallel=True) == 0
        )
        for router, place in self._places.items():
            tokens, row = self._tokens.get(router), place.layer - 1
            # Only one of the ranks that hold the layer adds the stage, from 1; the others add 0.
            sums.stages[row] = (place.stage + 1) * alone
            if tokens is None:
                continue
            sums.experts[row] += tokens
            sums.microbatches[row] += self._microbatches[router] * alone
            slots = self._slots.get(router)  # [experts]: expert held by each slot
            by_slot = tokens if slots is None else tokens[slots]
            # Slots are in rank order, the same number on each rank.
            sums.ranks[row, replica] += by_slot.view(ranks, -1).sum(dim=1)
            tokens.zero_()
            self._microbatches[router].zero_()
        return sums


class _Sums:
    """Sums over all ranks, as views of one tensor, so that a single all-reduce is enough.

    Attributes:
        all: concatenation of the other attributes, int64.
        stages: pipeline stage (from 1) of each layer, 0 for a dense layer, ``[layers]``.
        experts: tokens of each expert, ``[layers, experts]``.
        ranks: tokens of each rank, ``[layers, replicas, expert parallel ranks]``.
        microbatches: number of forwards of each layer on one rank, ``[layers]``.
    """

    def __init__(self, layers: int, experts: int, replicas: int, ranks: int) -> None:
        sizes = [layers, layers * experts, layers * replicas * ranks, layers]
        self.all = torch.zeros(sum(sizes), dtype=torch.int64, device=platforms.current().device)
        self.stages, of_experts, of_ranks, self.microbatches = self.all.split(sizes)
        self.experts = of_experts.view(layers, experts)
        self.ranks = of_ranks.view(layers, replicas, ranks)


def counts_of(context: Context[Options]) -> Counts:
    """Return the session's token counts."""
    return context.state(Counts)


def count_tokens(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``TopKRouter.forward``: count its routing map; the result is unchanged."""
    counts, padding = counts_of(context), context.options.padding

    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, input, *args, **kwargs)
        # Recomputed layers run twice, first without gradients; evaluation also runs without gradients.
        if self.training and torch.is_grad_enabled():
            routing_map = result[1]
            mask = args[0] if args else kwargs.get("padding_mask")
            if mask is not None:
                routing_map = routing_map & ~mask.reshape(-1, 1)
            if padding.rows:
                state = context.megatron("core.parallel_state")
                data = data_rows(padding, input, self.config.sequence_parallel, state)
                routing_map = routing_map if data is None else routing_map[data.reshape(-1)]
            counts.add(self, routing_map)
        return result

    return forward


in_block, in_mtp_block = numbering.decorators(lambda context: counts_of(context).built)
