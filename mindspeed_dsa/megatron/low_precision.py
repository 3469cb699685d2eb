"""Products in FP8 and FP4: the properties of a job's recipe, and recomputation as Transformer Engine does it.

Megatron multiplies in these formats only in Transformer Engine's layers. Without Transformer Engine, its
context for FP8 does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import Context
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches.spec import Patch

# -- the recipe ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LowPrecision:
    """Properties of a job's products in FP8 or FP4.

    Attributes:
        name: ``fp8`` or ``fp4``.
        recipe: value of ``--fp8-recipe`` or ``--fp4-recipe``.
        stored: whether weights are stored in this format (``--fp8-param-gather``). Otherwise Transformer
            Engine converts bf16 weights once a step.
        history: whether scales come from earlier microbatches, so that a product computed again later has
            another scale.
        rows_together: whether a scale depends on all rows of an operand, so that a part of the rows has
            another scale.
    """

    name: str
    recipe: str
    stored: bool
    history: bool
    rows_together: bool

    @property
    def flag(self) -> str:
        """Return the flag that switches the products on."""
        return f"--{self.name}-format"

    @property
    def stored_by(self) -> str:
        """Return the flag that stores weights in this format."""
        return f"--{self.name}-param-gather"


_HISTORY, _ROWS_TOGETHER = "history", "rows together"
_RECIPES: dict[str, tuple[str, ...]] = {
    # One scale for a tensor, from the largest values of earlier microbatches.
    "delayed": (_HISTORY,),
    # One scale for a tensor, from its own largest value.
    "tensorwise": (_ROWS_TOGETHER,),
    # One scale for 128 numbers of a row; for weights' gradients, for 128 rows of a column.
    "blockwise": (),
    # The same with 32.
    "mxfp8": (),
    # One scale for 16 numbers of a row, and one from the tensor's largest value.
    "nvfp4": (_ROWS_TOGETHER,),
}
_OTHER_RECIPES = "use --fp8-format with --fp8-recipe blockwise or mxfp8"
_UNKNOWN = (_HISTORY, _ROWS_TOGETHER)
"""Properties of ``custom``, a function of the job that may return any quantizer, and of later recipes."""


def low_precision(args: Any) -> LowPrecision | None:
    """Return the properties of a job's products in FP8 or FP4, or ``None`` for other jobs.

    Recipes are those of ``megatron.core.enums`` and of Transformer Engine's ``common/recipe``.

    Args:
        args: job's arguments, or a model configuration, whose fields have other names.
    """
    for name, default in (("fp8", "delayed"), ("fp4", "nvfp4")):
        if argument(args, name):
            recipe = argument(args, f"{name}_recipe") or default
            recipe = str(getattr(recipe, "value", recipe))  # an enum in configurations
            properties = _RECIPES.get(recipe, _UNKNOWN)
            return LowPrecision(
                name,
                recipe,
                stored=any(argument(args, f"{name}_{field}") for field in ("param_gather", "param")),
                history=_HISTORY in properties,
                rows_together=_ROWS_TOGETHER in properties,
            )
    return None


def check_stored(args: Any, flag: str, why: str) -> Iterator[str]:
    """Yield a problem if weights are stored in FP8 or FP4.

    Args:
        args: job's arguments, or a configuration.
        flag: feature's flag.
        why: reason, about weights.
    """
    precision = low_precision(args)
    if precision is not None and precision.stored:
        yield f"{flag} does not combine with {precision.stored_by}: {why}; omit {precision.stored_by}"


def check_history(args: Any, flag: str, why: str) -> Iterator[str]:
    """Yield a problem if scales come from earlier microbatches; arguments as in :func:`check_stored`."""
    precision = low_precision(args)
    if precision is not None and precision.history:
        yield (
            f"{flag} does not combine with --{precision.name}-recipe {precision.recipe}, whose scales come "
            f"from earlier microbatches: {why}; {_OTHER_RECIPES}, or omit {flag}"
        )


def check_rows_together(args: Any, flag: str, why: str) -> Iterator[str]:
    """Yield a problem if a scale depends on all rows of an operand; arguments as in :func:`check_stored`."""
    precision = low_precision(args)
    if precision is not None and precision.rows_together:
        yield (
            f"{flag} does not combine with --{precision.name}-recipe {precision.recipe}, which scales all "
            f"rows of an operand together: {why}; {_OTHER_RECIPES}, or omit {flag}"
        )


def check_own_products(args: Any, flag: str) -> Iterator[str]:
    """Yield a problem if a feature that multiplies without Transformer Engine is on in FP8 or FP4."""
    precision = low_precision(args)
    if precision is not None:
        yield (
            f"{flag} multiplies by itself, in the weights' dtype and not in {precision.name}; omit "
            f"{precision.flag} or {flag}"
        )


# -- recomputation -------------------------------------------------------------------------------


def run_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its second call repeats the products of the first one.

    As in Transformer Engine's ``checkpoint``, layers stash their scales in the first call, and the second one
    takes the oldest stash.

    Args:
        function: function to checkpoint; called in forward, and again in backward.

    Returns:
        The function itself if Transformer Engine is not installed.
    """
    engine = transformer_engine()
    if engine is None:
        return function
    precision: dict[str, Any] | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal precision
        if precision is None:
            enabled = engine.is_enabled()
            precision = {"enabled": enabled, "fp8_recipe": engine.recipe() if enabled else None}
            with engine.recomputed(activation_recompute=True, recompute_phase=False):
                return function(*args, **kwargs)
        with (
            engine.recomputed(activation_recompute=True, recompute_phase=True),
            engine.autocast(**precision),
        ):
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True)
class Engine:
    """Functions of Transformer Engine that its ``checkpoint`` calls."""

    is_enabled: Callable[[], bool]
    recipe: Callable[[], Any]
    autocast: Callable[..., Any]
    recomputed: Callable[..., Any]


def transformer_engine() -> Engine | None:
    """Return Transformer Engine's functions, or ``None`` if it is not installed.

    Raises:
        ImportError: the installed release has other names.
    """
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return None
    # Not in the `try`: without these functions a product would be repeated with other scales, unnoticed.
    from transformer_engine.pytorch.distributed import activation_recompute_forward
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast

    state = FP8GlobalStateManager
    return Engine(state.is_fp8_enabled, state.get_fp8_recipe, fp8_autocast, activation_recompute_forward)


def recompute_by_megatron(original: Callable[..., Any], context: Context[Any]) -> Callable[..., Any]:
    """Wrap ``te_checkpoint``: recompute by Megatron's own checkpoint, to which features add their work."""

    def te_checkpoint(
        forward_func: Callable[..., Any],
        distribute_saved_activations: bool,
        get_rng_state_tracker: Any,
        tp_group: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Megatron's checkpoint saves the states of its own tracker, and takes tensors by position alone.
        checkpoint = context.megatron("core.tensor_parallel.random").checkpoint
        run = run_again(lambda *inputs: forward_func(*inputs, **kwargs))
        return checkpoint(run, distribute_saved_activations, *args)

    return te_checkpoint


RECOMPUTED_BY_MEGATRON = Patch(
    "megatron.core.extensions.transformer_engine:te_checkpoint",
    "wrap",
    "mindspeed_dsa.megatron.low_precision:recompute_by_megatron",
    "jobs in FP8 recompute by Transformer Engine's checkpoint, to which this feature adds nothing",
    params=("forward_func", "distribute_saved_activations", "get_rng_state_tracker", "tp_group"),
    required=False,
    priority=300,  # outside wrappers for all checkpoints, which Megatron's checkpoint has too
    in_place_of="recomputation in FP8 and FP4",
)
"""Patch for features that extend Megatron's checkpoint."""
