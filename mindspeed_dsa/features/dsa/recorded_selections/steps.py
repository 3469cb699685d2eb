"""Microbatches of Megatron's schedules, each with the selections that its layers replay or leave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.recorded_selections.feature import RECORD, REPLAY, Options, header_of
from mindspeed_dsa.features.dsa.recorded_selections.recorder import Recorder
from mindspeed_dsa.features.dsa.recorded_selections.replay import HandedOver, Recorded, SelectionError
from mindspeed_dsa.megatron import pipeline_steps, replayed_selections
from mindspeed_dsa.megatron.replayed_selections import LayerRows, Microbatch
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.runs.selections import Header, Key, Recording
from mindspeed_dsa.schedule.events import Event, Kind

_Function = Callable[..., Any]


@dataclass
class _Sink:
    """Destination of one microbatch's selections.

    Attributes:
        recorder: of the rank; None where another rank has the same selections.
        wants_mass: as of :class:`.replayed_selections.Sink`.
        step: number of the step.
        place: of the microbatch in the global batch.
        asked: whether a layer has brought its selection.
    """

    recorder: Recorder | None
    wants_mass: bool
    step: int
    place: int
    asked: bool = False

    def take(
        self,
        rows: LayerRows,
        topk_indices: Sequence[Tensor | None],
        by_run: bool,
        mass: Tensor | None = None,
    ) -> None:
        """Do as :class:`.replayed_selections.Sink` says."""
        self.asked = True
        if self.recorder is not None:
            key = Key(self.step, self.place * rows.batch, rows.layer)
            self.recorder.take(key, rows, topk_indices, by_run, mass)


class Selections(pipeline_steps.Follower):
    """Selections of a session: what it replays, and what it records.

    Args:
        context: of the session.

    Attributes:
        recorder: of this rank; None before the first step, and where another rank has the same selections.
        step: number of the latest step, from 1.
    """

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context.megatron)
        self._options, self._log = context.options, context.log
        self._header: Header | None = None
        self._recording: Recording | None = None
        self.recorder: Recorder | None = None
        self.step, self._has_begun = 0, False
        self._selects = self._asked = self._evaluates = False

    def know(self, config: Any) -> None:
        """Take the model's configuration, and open the recording that is replayed.

        Raises:
            MindSpeedDSAError: it is of another model.
        """
        self._header = header_of(config)
        if self._options.replay is not None and self._recording is None:
            self._recording = Recording.open(self._options.replay)
            differences = list(self._recording.header.problems(self._header))
            if differences:
                raise MindSpeedDSAError(
                    f"{REPLAY} {self._options.replay} is of another model: {differences[0]}"
                )
            for problem in self._recording.problems:
                self._log.warning(f"{self._options.replay}: {problem}")

    def expect(self, layers: Iterable[int]) -> None:
        """Take numbers of layers of this rank: those that select have to ask for what is replayed."""
        self._selects |= not set(layers).isdisjoint(self._known_header().computing)

    def run(self, schedule: _Function, args: Any, step: dict[str, Any]) -> Any:
        """Call a schedule and follow it; an evaluation has selections only where the job hands them over."""
        self._asked, self._evaluates = False, bool(step.get("forward_only", False))
        before = replayed_selections.current()
        try:
            if not self._evaluates:
                return super().run(schedule, args, step)
            if not self._options.with_batch:
                return schedule(*args, **step)
            self.following = True
            result = schedule(*args, **step)
            self.ends(step)
            return result
        finally:
            self.following = False
            self._outputs.clear()
            # A forward that failed has left its microbatch, which nobody else may find.
            replayed_selections.put_down(before)

    def ends(self, step: dict[str, Any]) -> None:
        """Refuse a step whose selections nobody has attended to.

        Raises:
            SelectionError: attention runs elsewhere.
        """
        replays = self._options.replay is not None or self._options.with_batch
        if (replays or self._records()) and self._selects and not self._asked:
            what = (
                "asked for the keys that it is to attend to"
                if replays
                else "brought the keys that it selects"
            )
            raise SelectionError(
                f"{REPLAY if replays else RECORD}: no layer of this rank has {what}, so that "
                "its attention is not that of --use-fused-dsa; `python -m mindspeed_dsa doctor FLAGS` shows "
                "which patches of DSA are skipped on this release of Megatron-core, and context parallel "
                "ranks of 0.19 need --pack-documents for packs"
            )

    def begins(self, step: dict[str, Any]) -> bool:
        """Count the step, and begin to record with the first one."""
        self.step = self._step_of_job() or self.step + 1
        if self._options.record is not None and not self._has_begun:
            self._has_begun = True
            recorder = Recorder(self._options, self._known_header(), dist.get_rank(), self._log)
            recorder.begin(dist.get_world_size(), self.step)
            # Tensor parallel ranks select the same keys.
            if self.megatron("core.parallel_state").get_tensor_model_parallel_rank() == 0:
                self.recorder = recorder
        return True

    def _step_of_job(self) -> int | None:
        """Return the number of Megatron-LM's step, from 1; None in a job with a loop of its own."""
        variables = sys.modules.get(f"{self.megatron.root}.training.global_vars")
        iteration = getattr(getattr(variables, "_GLOBAL_ARGS", None), "curr_iteration", None)
        return None if iteration is None else int(iteration) + 1

    def before(self, events: Sequence[Event]) -> None:
        """Put the forward's microbatch down."""
        for event in events:
            if event.kind is Kind.FORWARD:
                replayed_selections.put_down(self._microbatch(event.microbatch))

    def after(self, events: Sequence[Event]) -> None:
        """Take it up again."""
        microbatch = replayed_selections.current()
        for end in () if microbatch is None else (microbatch.source, microbatch.sink):
            self._asked |= end is not None and end.asked
        replayed_selections.put_down(None)

    def _microbatch(self, number: int) -> Microbatch:
        state, chosen = self.megatron("core.parallel_state"), self._options
        place = number * state.get_data_parallel_world_size() + state.get_data_parallel_rank()
        microbatch = Microbatch()
        if self._recording is not None:
            microbatch.source = Recorded(self._recording, self.step, place, chosen.missing)
        elif chosen.with_batch:
            microbatch.source = HandedOver(self._known_header(), chosen.missing)
        if self._records():
            microbatch.sink = _Sink(self.recorder, chosen.mass, self.step, place)
        return microbatch

    def _records(self) -> bool:
        chosen = self._options
        is_wanted = chosen.steps is None or self.step in chosen.steps
        return chosen.record is not None and is_wanted and not self._evaluates

    def _known_header(self) -> Header:
        assert self._header is not None, "who runs a model has built it"
        return self._header


def start_at(context: Context[Options], step: int) -> None:
    """Say which step comes next, in a job that goes on from a checkpoint in a loop of its own.

    Args:
        context: of the session, ``session.contexts["dsa-recorded-selections"]``.
        step: its number, from 1.
    """
    selections_of(context).step = step - 1


def selections_of(context: Context[Options]) -> Selections:
    """Return the selections of the feature's session."""
    return context.state(Selections)


def know_model(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerBlock.__init__``."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        selections = selections_of(context)
        selections.know(config)
        original(self, config, *args, **kwargs)
        selections.expect(layer.layer_number for layer in self.layers)

    return __init__


def take_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``GPTModel.forward`` and ``GPTModel.build_schedule_plan``: note which tokens the rows have."""

    def forward(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        microbatch = replayed_selections.current()
        if microbatch is not None and self.pre_process:
            microbatch.tokens = input_ids
        return original(self, input_ids, *args, **kwargs)

    return forward


follow_steps, follow_forwards, follow_backwards = pipeline_steps.decorators(Selections)


def follow_pairs(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``combined_forward_backward_step``."""
    return pipeline_steps.follow_pairs(original, selections_of(context))
