"""Public API for loading released weights in a custom training loop.

See docs/features/load-hf.md, and docs/weights.md for the command ``python -m mindspeed_dsa weights``.
"""

from mindspeed_dsa.features.checkpoints.hugging_face.loading import load
from mindspeed_dsa.runs.files import RunError

__all__ = ["RunError", "load"]
