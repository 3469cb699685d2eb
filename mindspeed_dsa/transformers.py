"""Public API for DeepSeek Sparse Attention in Hugging Face's transformers.

``apply_dsa(model)`` converts a model; see docs/hosts/transformers.md. Importing this module imports torch but
not transformers.
"""

from mindspeed_dsa.integrations.transformers import InUse, Stage, apply_dsa

__all__ = ["InUse", "Stage", "apply_dsa"]
