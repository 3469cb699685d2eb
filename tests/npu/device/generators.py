"""Random numbers of the stand-in: equal to a CPU generator's with the same seed and earlier draws.

An NPU's generator is a seed and an offset, which each draw advances. A table maps offsets to states of a CPU
generator, so that saved, restored and forked generators draw the CPU platform's numbers.
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
    """Draw from the CPU's generator in place of an NPU's, whose offset the block's native call advances.

    Args:
        generator: NPU generator; None for the current device's own.
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
    # A CPU's generator takes only the lower 32 bits of its seed.
    return torch.Generator().manual_seed(zlib.crc32(key[-16:]) if offset else seed).get_state()
