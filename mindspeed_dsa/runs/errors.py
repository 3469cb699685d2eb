"""The error of this room."""

from __future__ import annotations

from mindspeed_dsa.patches.errors import MindSpeedDSAError


class RunError(MindSpeedDSAError):
    """Files that cannot be used; the message names them and says what to do."""
