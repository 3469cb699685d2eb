"""Random numbers of the stand-in: those of a CPU generator with the same seed and the same draws before.

An NPU's generator is a seed and an offset, which each draw moves on. A table says which state of a CPU
generator stands for an offset, so that generators that are saved, set and forked draw as those of the CPU
platform do.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_states: dict[bytes, Tensor] = {}


@contextmanager
def drawing(generator: torch.Generator | None) -> Iterator[None]:
    """Have the CPU's generator draw for an NPU's, which the block's native call moves on.

    Args:
        generator: of an NPU; None for the current device's own.
    """
    if generator is None:
        generator = torch.npu.default_generators[torch.npu.current_device()]
    host = torch.random.default_generator
    kept = host.get_state()
    host.set_state(_state_of(generator))
    try:
        yield
        _states[_key(generator)] = host.get_state()
    finally:
        host.set_state(kept)


def _key(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _state_of(generator: torch.Generator) -> Tensor:
    key = _key(generator)
    known = _states.get(key)
    if known is not None:
        return known
    # A seed without a draw; or, after a resumption, an offset that another process has reached.
    seed, offset = (int.from_bytes(part, "little") for part in (key[-16:-8], key[-8:]))
    # A CPU's generator takes the lower 32 bits of its seed alone.
    return torch.Generator().manual_seed(zlib.crc32(key[-16:]) if offset else seed).get_state()
