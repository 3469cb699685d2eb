"""One training step or evaluation with DualPipeV: run the schedule's list event by event.

The order comes only from the list that the simulator uses too. Forwards, backwards and pairs call Megatron's
own functions, which are looked up at each call so that other features' patches apply.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.pipeline.dualpipev.feature import CHUNKS, FLAG, Options
from mindspeed_dsa.features.pipeline.dualpipev.placement import Reporting
from mindspeed_dsa.features.pipeline.dualpipev.transfers import Groups, Transfers
from mindspeed_dsa.features.pipeline.waiting_gradients import WaitingGradients
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule import lists
from mindspeed_dsa.schedule.events import Event, Kind, Schedule

_Function = Callable[..., Any]
_Unit = tuple[int, int]
"""Chunk and microbatch."""
_NOT_SERVED = ("adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection")


def play_the_list(original: _Function, context: Context[Options]) -> _Function:
    """Wrap ``get_forward_backward_func``: return DualPipeV's schedule function for jobs with a pipeline."""
    groups = Groups()

    def get_forward_backward_func(pp_size: int | None = None, *args: Any, **kwargs: Any) -> _Function:
        state = context.megatron("core.parallel_state")
        ranks = state.get_pipeline_model_parallel_world_size() if pp_size is None else pp_size
        if ranks == 1:
            schedule: _Function = original(pp_size, *args, **kwargs) if pp_size else original(*args, **kwargs)
            return schedule

        def forward_backward(**step: Any) -> Any:
            # Inside the schedule, is_pp_last_stage asks where the model ends.
            with context.state(Reporting).being(False):
                return _Step(context, groups, **step).run()

        return forward_backward

    return get_forward_backward_func


class _Step:
    """Runner of one training step or evaluation on one pipeline rank.

    The constructor has the arguments of Megatron's schedule functions.
    """

    def __init__(
        self,
        context: Context[Options],
        groups: Groups,
        *,
        forward_step_func: _Function,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        force_all_reduce: bool = False,
        **others: Any,
    ) -> None:
        _refuse(others, model)
        megatron = context.megatron
        self._schedules = megatron("core.pipeline_parallel.schedules")
        self._megatron, self._model, self._data = megatron, model, data_iterator
        self._config = megatron("core.utils").get_model_config(model[0])
        self._forward_step_func, self._count, self._forward_only = (
            forward_step_func,
            num_microbatches,
            forward_only,
        )
        self._collect, self._first_val_step = collect_non_loss_data, first_val_step
        self._all_reduce = force_all_reduce
        self._plans = self._has_plans(context.options) and not forward_only
        self._inputs: dict[_Unit, Tensor | None] = {}
        self._outputs: dict[_Unit, Tensor] = {}
        self._reports: list[Any] = []
        self._device = next(self._parameters()).device
        self._tokens = torch.zeros([], dtype=torch.int, device=self._device)
        self._sync = _Synchronisation(self._config, model, num_microbatches)
        self._split = context.options.split and not forward_only
        self._waiting = WaitingGradients(model, num_microbatches, megatron) if self._split else None
        state = megatron("core.parallel_state")
        self._pipeline = state.get_pipeline_model_parallel_group()
        self._context_ranks = state.get_context_parallel_world_size()
        self._list = self._schedule()
        # Units whose weight gradients are a separate event on this rank.
        self._apart = {
            (event.chunk, event.microbatch)
            for event in self._list.ranks[self._pipeline.rank()]
            if event.kind is Kind.WEIGHT
        }
        # 8192 tokens, CP 2, TP 4 with sequence parallel: 8192 / 2 / 4 = 1024 rows.
        rows = (decoder_seq_length or seq_length) // self._context_ranks
        if self._config.sequence_parallel:
            rows //= state.get_tensor_model_parallel_world_size()
        shape = rows, micro_batch_size, self._config.hidden_size
        self._transfers = Transfers(
            self._list, groups.of(self._pipeline), shape, self._config.pipeline_dtype, self._device
        )

    def _parameters(self) -> Any:
        return (parameter for chunk in self._model for parameter in chunk.parameters())

    def _has_plans(self, options: Options) -> bool:
        """Return whether forwards return Megatron's schedule plans, which can be paired with a backward."""
        return options.paired and bool(getattr(self._config, "overlap_moe_expert_parallel_comm", False))

    def _schedule(self) -> Schedule:
        ranks = self._pipeline.size()
        if self._forward_only:
            return lists.dual_pipe_v_forwards(ranks, self._count)
        return lists.dual_pipe_v(ranks, self._count, self._plans, self._split)

    # -- the list ------------------------------------------------------------------------------------

    def run(self) -> list[Any]:
        """Run all events; return the loss reports, on the last rank only."""
        with contextlib.nullcontext() if self._waiting is None else self._waiting.step():
            return self._run()

    def _run(self) -> list[Any]:
        config = self._config
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        if not self._forward_only:
            self._sync.begin()
        blocks = list(self._list.blocks(self._transfers.rank))
        self._transfers.expect(blocks[0])
        for block, following in zip(blocks, [*blocks[1:], ()], strict=True):
            # Receives of the next block are posted before this block runs.
            self._transfers.expect(following)
            if self._plans and block[0].kind is not Kind.WEIGHT:
                self._run_plans(block)
            else:
                for event in block:
                    self._run_event(event)
        self._transfers.finish()
        reports = self._handed_over()
        if not self._forward_only:
            self._sync.end()
            self._finalize()
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return reports

    def _run_event(self, event: Event) -> None:
        # A dictionary of bound methods would be a cycle, which lives on under --manual-gc.
        if event.kind is Kind.FORWARD:
            self._forward(event)
        elif event.kind is Kind.BACKWARD:
            self._backward(event)
        else:
            self._give_weights(event)

    def _forward(self, event: Event) -> None:
        entered = self._enter(event)
        with self._deferring(event):
            output, tokens = self._schedules.forward_step(
                self._forward_step_func,
                self._data[event.chunk],
                self._model[event.chunk],
                self._count,
                entered,
                self._reports,
                self._config,
                cp_group_size=self._context_ranks,
                collect_non_loss_data=self._collect,
                is_first_microbatch=self._is_first(event),
                current_microbatch=event.microbatch,
                vp_stage=event.chunk,
                is_last_stage=self._is_last(event),
            )
        self._leave(event, output, tokens)

    def _backward(self, event: Event) -> None:
        self._sync.before(event)
        unit = (event.chunk, event.microbatch)
        gradient = self._transfers.take(event)
        step, options = self._schedules.backward_step, [self._config]
        if "model_type" in signature(step).parameters:  # before 0.18
            options.insert(0, self._megatron("core.utils").get_model_type(self._model[0]))
        gradient = step(self._inputs.pop(unit), self._outputs.pop(unit), gradient, *options)
        self._finish_backward(event, gradient)

    def _deferring(self, forward: Event | None) -> AbstractContextManager[Any]:
        """Return a context that defers a forward's weight gradients, if they are separate events."""
        if self._waiting is None or forward is None or not self._is_split(forward):
            return contextlib.nullcontext()
        return self._waiting.deferring(forward.chunk, forward.microbatch)

    def _is_split(self, event: Event) -> bool:
        """Return whether this forward's or backward's weight gradients are a separate event."""
        return (event.chunk, event.microbatch) in self._apart

    def _finish_backward(self, event: Event, gradient: Tensor | None) -> None:
        """Send the input's gradient, and report the backward to the gradient queue and the reduction."""
        if self._waiting is not None:
            self._waiting.ran_backward(event.chunk)
        if gradient is not None:
            self._transfers.hand_on(event, gradient)
        if self._waiting is not None and not self._is_split(event):
            self._waiting.left_nothing(event.chunk)
        self._sync.after(event)

    def _give_weights(self, event: Event) -> None:
        assert self._waiting is not None
        self._waiting.run(event.chunk, event.microbatch)

    def _run_plans(self, block: Sequence[Event]) -> None:
        """Run a forward, a backward or a pair with Megatron's ``combined_forward_backward_step``."""
        forward = next((event for event in block if event.kind is Kind.FORWARD), None)
        backward = next((event for event in block if event.kind is Kind.BACKWARD), None)
        self._megatron("core.pipeline_parallel.utils").set_streams()
        inputs: Any = None if forward is None else self._enter(forward)
        data, model = (None, None)
        if forward is not None:
            data, model = self._data[forward.chunk], self._model[forward.chunk]
        back: list[Any] = [None] * 4  # model, input, output and its gradient
        if backward is not None:
            self._sync.before(backward)
            unit = (backward.chunk, backward.microbatch)
            gradient = self._transfers.take(backward)
            back = [self._model[backward.chunk], self._inputs.pop(unit), self._outputs.pop(unit), gradient]
        run = self._megatron("core.pipeline_parallel.combined_1f1b").combined_forward_backward_step
        with self._deferring(forward):
            output, tokens, gradient = run(
                self._forward_step_func,
                data,
                model,
                self._count,
                inputs,
                self._reports,
                *back,
                self._config,
                f_model_chunk_id=None if forward is None else forward.chunk,
                collect_non_loss_data=self._collect,
                is_first_microbatch=forward is not None and self._is_first(forward),
                current_microbatch=None if forward is None else forward.microbatch,
            )
        if forward is not None:
            self._leave(forward, output, tokens)
        if backward is not None:
            self._finish_backward(backward, gradient)

    # -- values --------------------------------------------------------------------------------------

    def _enter(self, event: Event) -> Tensor | None:
        """Receive a forward's input, as a leaf of its graph; ``None`` for the first stage."""
        entered = self._transfers.take(event)
        if not self._forward_only:
            if entered is not None:
                entered.requires_grad_()
            self._inputs[event.chunk, event.microbatch] = entered
        return entered

    def _leave(self, event: Event, output: Tensor, tokens: Tensor) -> None:
        self._tokens += tokens
        self._transfers.hand_on(event, output)
        if self._forward_only:
            return
        self._outputs[event.chunk, event.microbatch] = output
        # Sent already; backward needs only its graph. The last stage keeps its loss.
        if not self._is_last(event):
            self._schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _is_last(self, event: Event) -> bool:
        return self._list.stage(self._transfers.rank, event.chunk) == self._list.stages - 1

    def _is_first(self, event: Event) -> bool:
        """Return whether this is the chunk's first forward in the step.

        In validation, only the first step's forward counts as the first one.
        """
        first = event.microbatch == 0
        if self._first_val_step is not None and self._forward_only:
            return bool(self._first_val_step) and first
        return first

    # -- the end of a step ---------------------------------------------------------------------------

    def _handed_over(self) -> list[Any]:
        """Send losses and the token count from the first rank to the last, which reports them."""
        ranks = dist.get_process_group_ranks(self._pipeline)
        payload: list[Any] = [None]
        if self._transfers.rank == 0:
            payload = [(self._reports, self._tokens, self._take_prediction_losses())]
            dist.send_object_list(tree_map(_to_host, payload), ranks[-1], self._pipeline)
            return []
        if self._transfers.rank == len(ranks) - 1:
            dist.recv_object_list(payload, ranks[0], self._pipeline)
            reports, self._tokens, prediction_losses = tree_map(self._to_device, payload[0])
            if prediction_losses:
                self._prediction_log().tracker.update(prediction_losses, reduce_group=None, avg_group=None)
            return list(reports)
        return []

    def _prediction_log(self) -> Any:
        """Return Megatron's log of losses of multi-token prediction, which exists once on each rank."""
        return self._megatron("core.transformer.multi_token_prediction").MTPLossLoggingHelper

    def _take_prediction_losses(self) -> dict[str, Tensor]:
        """Reduce the logged losses over data parallel ranks, and remove them from this rank's log."""
        if self._forward_only or not getattr(self._config, "mtp_num_layers", None):
            return {}
        log = self._prediction_log()
        reduce = getattr(log, "reduce_metrics_in_tracker", None)  # from 0.19 on, with numbers of hits
        (reduce or log.reduce_loss_in_tracker)()
        names = [name for name, value in log.tracker.items() if isinstance(value, Tensor)]
        return {name: log.tracker.pop(name) for name in names}

    def _to_device(self, value: Any) -> Any:
        return value.to(self._device) if isinstance(value, Tensor) else value

    def _finalize(self) -> None:
        finalize, config = self._config.finalize_model_grads_func, self._config
        if finalize is not None:
            more = {"force_all_reduce": True} if self._all_reduce else {}
            finalize(self._model, self._tokens if config.calculate_per_token_loss else None, **more)


def _to_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _refuse(others: dict[str, Any], model: Any) -> None:
    """Raise for arguments that only Megatron's own schedules support."""
    for name, value in others.items():
        if name not in _NOT_SERVED or value is not None:
            raise SettingsError(f"{FLAG}: the schedule was called with {name}, which it does not serve")
    if not isinstance(model, list) or len(model) != CHUNKS:
        raise SettingsError(f"{FLAG}: the schedule needs a list of two model chunks")


class _Synchronisation:
    """Control of the data parallel gradient reduction, which runs at each chunk's last backward.

    Args:
        config: Megatron configuration with ``no_sync_func``, ``grad_sync_func`` and ``param_sync_func``.
        model: chunks of this rank.
        microbatches: number of microbatches of the step.
    """

    def __init__(self, config: Any, model: list[Any], microbatches: int) -> None:
        self._config, self._model, self._last = config, model, microbatches - 1
        self._held: contextlib.ExitStack | None = None

    def begin(self) -> None:
        """Disable gradient reduction, and start the parameter gather if the configuration asks for it."""
        self._hold()
        for chunk, sync in enumerate(_per_chunk(self._config.param_sync_func, self._model)):
            sync(self._model[chunk].parameters())

    def before(self, event: Event) -> None:
        """Enable reduction during a chunk's last backward, unless the schedule starts it explicitly."""
        if event.microbatch == self._last and self._config.grad_sync_func is None:
            self._let_go()

    def after(self, event: Event) -> None:
        """After a chunk's last backward, start its reduction if configured, and disable reduction again."""
        functions = _per_chunk(self._config.grad_sync_func, self._model)
        if event.microbatch == self._last and functions:
            self._let_go()
            functions[event.chunk](self._model[event.chunk].parameters())
        self._hold()

    def end(self) -> None:
        """Enable gradient reduction again, after the step."""
        self._let_go()

    def _hold(self) -> None:
        if self._held is None:
            self._held = contextlib.ExitStack()
            functions = self._config.no_sync_func
            for function in functions if isinstance(functions, list) else [functions]:
                if function is not None:
                    self._held.enter_context(function())

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def _per_chunk(functions: Any, model: list[Any]) -> list[_Function]:
    if functions is None:
        return []
    return functions if isinstance(functions, list) else [functions] * len(model)
