"""DeepSeek Sparse Attention in Hugging Face's transformers, under a name that stays.

``apply_dsa(model)`` serves a model; the page is docs/hosts/transformers.md. Importing this module imports
torch, and not yet transformers.
"""

from mindspeed_dsa.integrations.transformers import InUse, Stage, apply_dsa

__all__ = ["InUse", "Stage", "apply_dsa"]
