"""Patches that name collectives by layer, microbatch and direction (forward or backward)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.diagnostics.collectives.feature import Options
from mindspeed_dsa.features.diagnostics.collectives.recorder import Recorder
from mindspeed_dsa.megatron import pipeline_steps, split_layers
from mindspeed_dsa.parallel import names
from mindspeed_dsa.parallel.names import Name, Pass, named
from mindspeed_dsa.schedule.events import Event, Kind

if TYPE_CHECKING:
    from typing_extensions import Self

_Function = Callable[..., Any]
_DIRECTIONS = {**{kind: kind.name.lower() for kind in Kind}, Kind.WEIGHT: "weight gradients"}


class Passes(pipeline_steps.Follower):
    """Callback that sets the current name at the beginning of each forward and backward."""

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context)
        self._recorder = context.state(Recorder)

    @classmethod
    def of(cls, context: Context[Options]) -> Self:
        """Return the recorder's follower, which is created on first use."""
        recorder = context.state(Recorder)
        if recorder.follower is None:
            recorder.follower = cls(context)
        return cast("Self", recorder.follower)

    def begins(self, step: dict[str, Any]) -> bool:
        """Count the step; return True, because every step is followed."""
        self._recorder.step += 1
        self._recorder.after = ()
        return True

    def before(self, events: Sequence[Event]) -> None:
        """Set the current name to the microbatches of the events that start now."""
        passes = tuple(Pass(_DIRECTIONS[event.kind], event.microbatch, event.chunk) for event in events)
        self._recorder.passes = passes
        names.set_current(Name(passes=passes))

    def after(self, events: Sequence[Event]) -> None:
        """Clear the current name."""
        self._recorder.passes, self._recorder.after = (), self._recorder.passes
        names.set_current(Name())


def name_layer(original: _Function) -> _Function:
    """Decorate ``TransformerLayer.forward``: add the layer to its collectives' names, also in backward.

    In backward, a layer begins when the gradient of its output is computed, and ends when another layer
    begins.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = names.current()
        with names.under(replace(before, layer=self.layer_number)):
            result = original(self, *args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        if torch.is_grad_enabled() and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(_enter, self.layer_number))
        return result

    return forward


def name_pieces(original: _Function) -> _Function:
    """Decorate ``TransformerLayer.__init__``: name collectives also if a schedule runs the layer in parts."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        split_layers.follow(self, _Pieces)

    return __init__


class _Pieces(split_layers.Pass):
    """Forward of a layer that a schedule splits into parts."""

    def __init__(self, layer: Any, hidden: Tensor, others: Sequence[Any]) -> None:
        self._number = layer.layer_number

    def piece(self) -> AbstractContextManager[None]:
        """Return a context manager that adds the layer to the names of collectives."""
        return names.under(replace(names.current(), layer=self._number))

    def ends(self, output: Tensor) -> None:
        """Add the layer to the names of collectives in its backward."""
        if output.requires_grad:
            output.register_hook(partial(_enter, self._number))


def _enter(layer: int, gradient: Tensor) -> None:
    names.set_current(replace(names.current(), layer=layer))


def name_dispatch(original: _Function) -> _Function:
    """Decorate ``MoEAlltoAllTokenDispatcher.token_dispatch``: name its all-to-all "dispatch"."""
    return _naming(original, "dispatch")


def name_combine(original: _Function) -> _Function:
    """Decorate ``MoEAlltoAllTokenDispatcher.token_combine``: name its all-to-all "combine"."""
    return _naming(original, "combine")


def _naming(original: _Function, what: str) -> _Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        if names.current().what:  # already named by a feature that replaces the all-to-all
            return original(*args, **kwargs)
        with named(what):
            return original(*args, **kwargs)

    return call
