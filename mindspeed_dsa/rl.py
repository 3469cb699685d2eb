"""Selections of a rollout in training, under names that stay.

``decode`` reads an engine's record, ``hand_over_requests`` gives it to the job with each microbatch; the page
is docs/hosts/dsa-in-rl.md. Recordings in files are on docs/features/dsa-recorded-selections.md.
"""

from mindspeed_dsa.features.dsa.selections.format import Recording
from mindspeed_dsa.features.dsa.selections.replay import (
    Handed,
    SelectionError,
    decode,
    hand_over,
    hand_over_requests,
    write_recording,
)

__all__ = [
    "Handed",
    "Recording",
    "SelectionError",
    "decode",
    "hand_over",
    "hand_over_requests",
    "write_recording",
]
