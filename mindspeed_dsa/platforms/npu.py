"""Ascend NPUs: torch_npu, with its own redirection of ``torch.cuda``."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.platforms.cuda import CudaPlatform

_INSTALL = "install the torch_npu release that matches your torch (pip install torch_npu==<torch version>)"
_CANN = (
    "install the CANN toolkit and source its set_env.sh (it puts libascendcl.so and its fellows on "
    "LD_LIBRARY_PATH), and check the driver with npu-smi info"
)


class NpuPlatform(CudaPlatform):
    """One NPU per process; HCCL between them. ``torch.npu`` has the shape of ``torch.cuda``."""

    name = "npu"
    device_type = "npu"
    backend = "hccl"

    @property
    def _module(self) -> Any:
        return _torch_npu().npu

    def is_available(self) -> bool:
        return find_spec("torch_npu") is not None and bool(self._module.is_available())

    def prepare(self) -> None:
        """Import torch_npu and its ``transfer_to_npu``, which sends ``torch.cuda`` calls to the NPU.

        The redirection is torch_npu's own and cannot be undone.

        Raises:
            SettingsError: torch_npu is missing, does not load, or sees no NPU.
        """
        if not _torch_npu().npu.is_available():
            raise SettingsError(f"platform npu: torch_npu is there but sees no NPU; {_CANN}")
        import_module("torch_npu.contrib.transfer_to_npu")


def _torch_npu() -> Any:
    if find_spec("torch_npu") is None:
        raise SettingsError(f"platform npu: torch_npu is not installed; {_INSTALL}")
    try:
        return import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise SettingsError(f"platform npu: torch_npu does not load ({error}); {_CANN}") from error
