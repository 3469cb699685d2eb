"""Steps of an optimizer that failed in the middle, with some parameters updated and others not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class StepIntegrity:
    """Record of whether an optimizer's last step updated all parameters, or failed in the middle.

    Args:
        feature: name of the feature that keeps the state.
    """

    def __init__(self, feature: str) -> None:
        self._feature = feature
        self._stale: set[Any] | None = None

    @property
    def broken(self) -> bool:
        """Whether a step failed in the middle, and the optimizer state has not been reloaded since."""
        return self._stale is not None

    def mark_broken(self, parameters: Iterable[Any]) -> None:
        """Record that a step has failed.

        Args:
            parameters: keys of the state that must be loaded before the optimizer is usable again.
        """
        self._stale = set(parameters)

    def loaded(self, parameter: Any) -> None:
        """Record that all state of one parameter has been loaded."""
        if self._stale is not None:
            self._stale.discard(parameter)
            self._stale = self._stale or None  # the last missing parameter was loaded

    def all_loaded(self) -> None:
        """Record that all state has been loaded, or that a step has completed."""
        self._stale = None

    def require(self) -> None:
        """Raise if a step has failed in the middle.

        Raises:
            RuntimeError: a step has failed and its state was not loaded again.
        """
        if self.broken:
            raise RuntimeError(
                f"{self._feature}: a step of this optimizer failed in the middle, so weights and optimizer "
                "state are those of no step and are neither updated nor saved; start again from the last "
                "checkpoint, or load a state dict into the model and into the optimizer"
            )


class Writes:
    """Detects whether an optimizer's step has written to given tensors in place.

    torch increments a tensor's version counter for each in-place write. Fused kernels and other libraries do
    not increment it.

    Args:
        optimizer: inner optimizer.
        tensors: tensors to watch, as they are before the step. A view shares its version with its base.
    """

    def __init__(self, optimizer: Any, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._before = tensors, [tensor._version for tensor in tensors]
        self._are_counted = type(optimizer).__module__.startswith("torch.optim") and not any(
            group.get("fused") for group in optimizer.param_groups
        )

    def may_have_happened(self) -> bool:
        """Return False if it is certain that no tensor was written since this object was created."""
        return not self._are_counted or self._before != [tensor._version for tensor in self._tensors]
