"""Released weights in a training loop of one's own, under names that stay.

The page is docs/features/load-hf.md; the command ``python -m mindspeed_dsa weights`` is on docs/weights.md.
"""

from mindspeed_dsa.features.checkpoints.hugging_face.loading import load
from mindspeed_dsa.runs.files import RunError

__all__ = ["RunError", "load"]
