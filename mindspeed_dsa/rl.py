"""Public API for replaying a rollout's key selections in training.

``decode`` reads the selections recorded by an inference engine, and ``hand_over_requests`` passes them to the
job with each microbatch; see docs/hosts/dsa-in-rl.md. Recordings in files are described in
docs/features/dsa-recorded-selections.md.
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
