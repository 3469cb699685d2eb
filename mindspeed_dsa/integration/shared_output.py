"""The shared expert's output where Megatron's steps hand it on before there is one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class SharedOutput:
    """Stands for the output until it is computed, in the steps that only pass it on.

    Args:
        compute: runs the shared expert.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._output: Tensor | None = None

    def compute(self) -> None:
        """Run the shared expert."""
        self._output = self._compute()

    @property
    def tensor(self) -> Tensor:
        """The output, once it is computed: before the last of Megatron's steps, which adds it."""
        assert self._output is not None
        return self._output

    def __radd__(self, routed: Tensor) -> Tensor:
        """What Megatron does with it in the end: ``routed + shared``."""
        return routed + self.tensor
