"""Optimizer state after a whole number of steps, or state that training must not continue from.

Megatron's own step, when it fails in the middle, leaves some parameters updated and others not, and the next
step continues from there. State that lies elsewhere cannot always be left as Megatron would leave it: then
the optimizer refuses to step and to be saved until all of its state has been loaded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class WholeSteps:
    """Whether an optimizer's state is that of a whole number of steps.

    Args:
        feature: name of the feature that keeps the state.
    """

    def __init__(self, feature: str) -> None:
        self._feature = feature
        self._stale: set[Any] | None = None

    @property
    def torn(self) -> bool:
        """Whether a step has failed in a way that leaves other state than Megatron's own step would."""
        return self._stale is not None

    def tear(self, parameters: Iterable[Any]) -> None:
        """A step has failed.

        Args:
            parameters: what has to be loaded before the state is whole again, by any key.
        """
        self._stale = set(parameters)

    def loaded(self, parameter: Any) -> None:
        """All state of one parameter has been loaded."""
        if self._stale is not None:
            self._stale.discard(parameter)
            self._stale = self._stale or None

    def all_loaded(self) -> None:
        """All state has been loaded, or a step has been completed."""
        self._stale = None

    def require(self) -> None:
        """Check it.

        Raises:
            RuntimeError: a step has failed in the middle.
        """
        if self.torn:
            raise RuntimeError(
                f"{self._feature}: a step of this optimizer failed in the middle, so weights and optimizer "
                "state are those of no step and are neither updated nor saved; start again from the last "
                "checkpoint, or load a state dict into the model and into the optimizer"
            )


class Writes:
    """Whether an optimizer has written to tensors since this was created, as far as can be known.

    torch counts in-place writes to each tensor. Its fused kernels and those of other libraries do not count.

    Args:
        optimizer: the inner one.
        tensors: that it may write to; views count together with what they are views of.
    """

    def __init__(self, optimizer: Any, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._before = tensors, [each._version for each in tensors]
        self._are_counted = type(optimizer).__module__.startswith("torch.optim") and not any(
            group.get("fused") for group in optimizer.param_groups
        )

    def may_have_happened(self) -> bool:
        """False only if there was none."""
        return not self._are_counted or self._before != [each._version for each in self._tensors]
