"""Patch engine: replaces attributes of third-party modules, and restores them.

Independent of Megatron and of features. The only part of torch that it uses is torch.compile.
"""

from mindspeed_dsa.patches.errors import MindSpeedDSAError, PatchDeclarationError, PatchError, SettingsError
from mindspeed_dsa.patches.manager import PatchManager
from mindspeed_dsa.patches.site import Covered, SiteReport
from mindspeed_dsa.patches.spec import Claim, Patch

__all__ = [
    "Claim",
    "Covered",
    "MindSpeedDSAError",
    "Patch",
    "PatchDeclarationError",
    "PatchError",
    "PatchManager",
    "SettingsError",
    "SiteReport",
]
