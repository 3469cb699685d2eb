"""``doctor --device`` at a size that the stand-in's kernels compute in seconds."""

from __future__ import annotations

import sys

from mindspeed_dsa.features.dsa import problem
from mindspeed_dsa.tools.trial import device

LENGTH = 32

if __name__ == "__main__":
    device.LENGTH = device.SIZES["dsa_indexer_topk"] = LENGTH
    # At this size the operators get selections of all keys, which would otherwise be dense attention.
    problem.every_key_is_chosen = lambda *_: False
    device.main(*sys.argv[1:])
