"""Where each group's rows begin and end, on the host and on the device, each found once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.checks import require


class Groups:
    """Numbers of rows of consecutive groups.

    Args:
        tokens_per_expert: ``[groups]`` integers, on the host or on a device; not to be changed afterwards.
    """

    def __init__(self, tokens_per_expert: Tensor | Sequence[int]) -> None:
        self._given = tokens_per_expert
        self._ends: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self._given)

    @property
    def on_host(self) -> bool:
        """Whether :attr:`sizes` is known without waiting for a device."""
        return not isinstance(self._given, Tensor) or self._given.device.type == "cpu"

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each group; waits for the device that they are on."""
        return self._given.tolist() if isinstance(self._given, Tensor) else list(self._given)

    def ends(self, device: torch.device) -> Tensor:
        """One past the last row of each group, ``[groups]`` int32; nothing waits for it."""
        if device not in self._ends:
            given = torch.as_tensor(self._given)
            ends = given.cumsum(0, dtype=torch.int32)
            self._ends[device] = ends.to(device, non_blocking=True)
        return self._ends[device]

    def check(self, operator: str, groups: int, rows: int) -> None:
        """Raise ``ValueError`` unless they are ``groups`` numbers that fit ``rows`` rows.

        The sum of numbers on a device is looked at with debug checks on only, as that waits for it.
        """
        shape = list(self._given.shape) if isinstance(self._given, Tensor) else [len(self._given)]
        require(shape == [groups], operator, f"tokens_per_expert must be [{groups}], got {shape}")
        if isinstance(self._given, Tensor):
            dtype = self._given.dtype
            require(
                not dtype.is_floating_point and dtype != torch.bool,
                operator,
                f"tokens_per_expert must be integers, got {dtype}",
            )
        if self.on_host or checks.enabled():
            require(
                sum(self.sizes) == rows and min(self.sizes) >= 0,
                operator,
                f"tokens_per_expert must be numbers whose sum is the number of rows, {rows}, got "
                f"{sum(self.sizes)} as the sum and {min(self.sizes)} as the least",
            )
