"""The patch engine. Knows nothing of Megatron or of features, and of torch only that it compiles."""

from mindspeed_dsa.patches.errors import MindSpeedDSAError, PatchDeclarationError, PatchError, SettingsError
from mindspeed_dsa.patches.manager import PatchManager
from mindspeed_dsa.patches.report import SiteReport
from mindspeed_dsa.patches.spec import Claim, Patch

__all__ = [
    "Claim",
    "MindSpeedDSAError",
    "Patch",
    "PatchDeclarationError",
    "PatchError",
    "PatchManager",
    "SettingsError",
    "SiteReport",
]
