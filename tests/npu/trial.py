"""``doctor --device`` at a size that the kernels of the stand-in take seconds for, not minutes."""

from __future__ import annotations

import sys

from mindspeed_dsa.features.dsa import problem
from mindspeed_dsa.tools.trial import device

LENGTH = 32

if __name__ == "__main__":
    device.LENGTH = device.SIZES["dsa_indexer_topk"] = LENGTH
    # Selections of all keys are what the operators take at this size; otherwise dense attention has them.
    problem.every_key_is_chosen = lambda *_: False
    device.main(*sys.argv[1:])
