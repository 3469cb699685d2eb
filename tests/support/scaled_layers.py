"""Stand-in for Transformer Engine's linear layers in FP8, on Megatron's own layers and a CPU.

Inputs and gradients of outputs are rounded to FP8, with scales as in Transformer Engine 2:

* ``autocast``, updates of scales, and the stash of scales for recomputation follow ``FP8GlobalStateManager``
  in ``pytorch/quantization.py`` and ``activation_recompute_forward`` in ``pytorch/distributed.py``;
* which module's backward updates the scales of gradients follows ``module/linear.py``.

Weights are not rounded. But as there, they are read once a step, in the first microbatch. A scale is not
reduced over ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from packaging.version import Version
from torch import Tensor, nn

from tests.support.example_job import RankOutcome
from tests.support.example_job import train as train_job

BLOCK = 128
UPDATED, ROUNDED, REPEATED, READ = (
    "scales updated",
    "inputs rounded",
    "products recomputed",
    "weights read",
)
MOST = "most roundings between two updates of a scale"


@dataclass
class Scale:
    """Scale of a tensor by delayed scaling, with a history of one entry.

    Attributes:
        dtype: dtype to which values are rounded.
        factor: factor of values before rounding.
        amax: largest value since the last update.
        roundings: number of roundings since the last update.
    """

    dtype: torch.dtype
    factor: float = 1.0
    amax: float = 0.0
    roundings: int = 0

    def update(self) -> bool:
        """Compute the factor from the largest value; keep it if no value was rounded since the last time."""
        changes = self.amax > 0
        if changes:
            self.factor = torch.finfo(self.dtype).max / self.amax
        self.amax, self.roundings = 0.0, 0
        return changes

    def rounded(self, values: Tensor, recipe: str) -> Tensor:
        """Return the values rounded to FP8, in their own dtype."""
        if not values.numel():
            return values
        numbers = values.float()
        if recipe == "delayed":
            factor: Any = self.factor
            amax = float(numbers.abs().max())
            self.amax = max(self.amax, amax)
            self.roundings += amax > 0
        elif recipe == "tensorwise":
            factor = _factor(numbers.abs().max(), self.dtype)
        else:
            blocks = numbers.reshape(*numbers.shape[:-1], -1, math.gcd(BLOCK, numbers.size(-1)))
            factor = _factor(blocks.abs().amax(-1, keepdim=True), self.dtype).expand_as(blocks)
            factor = factor.reshape(numbers.shape)
        largest = torch.finfo(self.dtype).max
        quantised = (numbers * factor).clamp(-largest, largest).to(self.dtype)
        rounded: Tensor = (quantised.float() / factor).to(values.dtype)
        return rounded


def _factor(amax: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(amax > 0, torch.finfo(dtype).max / amax, torch.ones_like(amax))


@dataclass(eq=False)
class Layer:
    """State of one linear layer."""

    module: nn.Module
    inputs: Scale = field(default_factory=lambda: Scale(torch.float8_e4m3fn))
    gradients: Scale = field(default_factory=lambda: Scale(torch.float8_e5m2))
    stash: deque[tuple[float, float, int, Tensor]] = field(default_factory=deque)
    with_graph: int = 0
    backwards: int = 0
    weight: Tensor | None = None


class Engine:
    """State that all layers of a process share."""

    def __init__(self) -> None:
        self.enabled, self.recipe, self.depth, self.first = False, "", 0, False
        self.recomputed_region = self.recompute_phase = False
        self.flags: list[bool] = []
        self.layers: dict[nn.Module, Layer] = {}
        self.counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def autocast(self, enabled: bool = True, fp8_recipe: Any = None, **_: Any) -> Iterator[None]:
        """Enable rounding; update the scales of inputs at the end of the outermost context."""
        before = self.enabled, self.recipe, self.first
        self.enabled, self.recipe = enabled, str(getattr(fp8_recipe, "value", fp8_recipe))
        if self.depth == 0:
            self.first = True
        self.depth += 1
        try:
            yield
        finally:
            self.enabled, self.recipe, self.first = before
            self.depth -= 1
            if enabled and self.depth == 0 and torch.is_grad_enabled():
                self.update("inputs")

    def update(self, which: str) -> None:
        """Update all layers' scales of inputs or of gradients."""
        for layer in self.layers.values():
            scale: Scale = getattr(layer, which)
            self.counts[MOST] = max(self.counts[MOST], scale.roundings)
            self.counts[UPDATED] += scale.update()

    @contextlib.contextmanager
    def recomputed(self, activation_recompute: bool, recompute_phase: bool) -> Iterator[None]:
        """Stash scales in the first run of a checkpointed function, and take them in the second."""
        self.recomputed_region, self.recompute_phase = activation_recompute, recompute_phase
        if recompute_phase:
            self.first = self.flags.pop(0)
        else:
            self.flags.append(self.first)
        try:
            yield
        finally:
            self.recomputed_region = self.recompute_phase = False

    def takes_update(self) -> bool:
        """Return whether the layer is the first of its context: its backward updates gradients' scales."""
        first = self.first
        self.first = first and self.recompute_phase
        return first

    def context(self, config: Any, layer_no: int = -1, is_init: bool = False) -> Any:
        """Return the context of Megatron's ``get_fp8_context``."""
        return self.autocast(True, config.fp8_recipe) if config.fp8 and not is_init else _nothing()

    def checkpoint(
        self,
        function: Callable[..., Any],
        distributed: bool,
        tracker: Any,
        group: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Checkpoint a function as Transformer Engine's ``checkpoint`` does."""
        from megatron.core.tensor_parallel.random import CheckpointFunction

        calls: list[tuple[bool, str]] = []

        def run(*inputs: Any) -> Any:
            if not calls:
                calls.append((self.enabled, self.recipe))
                with self.recomputed(True, False):
                    return function(*inputs, **kwargs)
            with self.recomputed(True, True), self.autocast(*calls[0]):
                return function(*inputs, **kwargs)

        return CheckpointFunction.apply(run, distributed, *args)

    def multiply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward`` of Megatron's linear layers."""

        @wraps(original)
        def forward(module: Any, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Only the output layer gets a weight; it is Megatron's own beside Transformer Engine's, too.
            if not self.enabled or "weight" in kwargs:
                return original(module, input_, *args, **kwargs)
            layer = self.layers.setdefault(module, Layer(module))
            self._read_weight(layer)
            self.counts[ROUNDED] += 1
            again = self.recompute_phase
            newest = layer.inputs.factor, layer.inputs.amax, layer.inputs.roundings
            if again and self.recipe == "delayed":
                *oldest, expected = layer.stash.popleft()
                assert torch.equal(expected, input_), "a product is recomputed for another microbatch"
                layer.inputs.factor, layer.inputs.amax, layer.inputs.roundings = oldest
                self.counts[REPEATED] += 1
            elif self.recomputed_region and self.recipe == "delayed":
                layer.stash.append((*newest, input_.detach().clone()))
            learns = torch.is_grad_enabled()
            entered = _Enter.apply(input_, self, layer, learns and self.takes_update(), self.recipe)
            output, *rest = original(module, entered, *args, **kwargs)
            if again and self.recipe == "delayed":
                layer.inputs.factor, layer.inputs.amax, layer.inputs.roundings = newest
            layer.with_graph += learns and output.requires_grad
            return _Leave.apply(output, layer, self.recipe), *rest

        return forward

    def _read_weight(self, layer: Layer) -> None:
        module: Any = layer.module
        if module.is_first_microbatch:
            layer.weight = module.weight.detach().clone()
            module.is_first_microbatch = False
            self.counts[READ] += 1
        assert layer.weight is not None
        assert torch.equal(layer.weight, module.weight), "weights of another step"

    def finished(self) -> None:
        """Check that every product with a graph had one backward, and that every stash was taken."""
        for layer in self.layers.values():
            assert layer.with_graph == layer.backwards, (layer.with_graph, layer.backwards)
            assert not layer.stash
            assert layer.inputs.roundings == layer.gradients.roundings == 0, "scales that were not updated"
        assert not self.flags


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Enter(torch.autograd.Function):
    """Round a layer's input; at the end of its backward, update scales if it is the first layer."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, engine: Engine, layer: Layer, updates: bool, recipe: str) -> Tensor:
        ctx.engine, ctx.updates = engine, updates
        return layer.inputs.rounded(values, recipe)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.updates:
            ctx.engine.update("gradients")
        return gradient, None, None, None, None


class _Leave(torch.autograd.Function):
    """Round the gradient of a layer's output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, layer: Layer, recipe: str) -> Tensor:
        ctx.layer, ctx.recipe = layer, recipe
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.layer.backwards += 1
        return ctx.layer.gradients.rounded(gradient, ctx.recipe), None, None


@contextlib.contextmanager
def instead_of_transformer_engine(engine: Engine) -> Iterator[None]:
    """Make Megatron's linear layers round, inside its contexts for FP8."""
    import sys

    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.models.common import model_chunk_schedule_plan
    from megatron.core.pipeline_parallel import combined_1f1b
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import multi_token_prediction, transformer_block

    from mindspeed_dsa.megatron import low_precision

    ours = low_precision.Engine(
        lambda: engine.enabled, lambda: engine.recipe, engine.autocast, engine.recomputed
    )
    users: Sequence[ModuleType] = (
        model_chunk_schedule_plan,
        combined_1f1b,
        multi_token_prediction,
        transformer_block,
    )
    with contextlib.ExitStack() as stack:
        for module in users:
            stack.enter_context(mock.patch.object(module, "get_fp8_context", engine.context))
        for module in (extension, transformer_block, sys.modules["megatron.core.transformer.moe.moe_layer"]):
            stack.enter_context(mock.patch.object(module, "te_checkpoint", engine.checkpoint, create=True))
        for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
            stack.enter_context(mock.patch.object(kind, "forward", engine.multiply(kind.forward)))
            stack.enter_context(mock.patch.object(kind, "is_first_microbatch", True, create=True))
        stack.enter_context(mock.patch.object(low_precision, "transformer_engine", return_value=ours))
        yield


def train(argv: Sequence[str], *, recipe: str, rounds: bool = True, **arguments: Any) -> RankOutcome:
    """Run the job of ``examples/`` in FP8.

    Args:
        argv: flags of ``pretrain_dsa.py``.
        recipe: Megatron's recipe.
        rounds: whether the stand-in works. Otherwise nothing is rounded, as Transformer Engine is missing.
        **arguments: further arguments of :func:`example_job.train`.
    """
    from dsa_job import arguments as parser
    from megatron.core import utils

    parse = parser.parse_args

    def parse_args(words: Sequence[str]) -> Any:
        args = parse(words)
        args.fp8, args.fp8_recipe = "hybrid", recipe
        return args

    engine = Engine()
    working = instead_of_transformer_engine(engine) if rounds else _nothing()
    with (
        mock.patch.object(parser, "parse_args", parse_args),
        # Megatron compares it with a version, even if Transformer Engine is missing.
        mock.patch.object(utils, "_te_version", Version("2.5")),
        working,
    ):
        outcome = train_job(argv, **arguments)
    engine.finished()
    outcome.memory.update(engine.counts)
    return outcome
