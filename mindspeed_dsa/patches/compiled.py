"""Code that torch.compile compiled before or while functions were patched.

Its guards watch the globals that a compiled caller uses, but not the methods of classes: measured on
torch 2.13, a compiled module keeps running the original of a method that was patched afterwards.
"""

from __future__ import annotations

import sys


def forget() -> None:
    """Drop compiled code, if there is any; it is compiled again at the next call.

    Waits for a compilation in progress, so no lock may be held.
    """
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    # Where the count of compiled frames cannot be read, there may have been some.
    if convert_frame is not None and getattr(convert_frame, "FRAME_COUNTER", True):
        reset = getattr(sys.modules.get("torch._dynamo"), "reset", None)
        if reset is not None:
            reset()
