"""Ascend NPUs: torch_npu, with its own redirection of ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.platforms.cuda import CudaPlatform
from mindspeed_dsa.platforms.npu_environment import environment
from mindspeed_dsa.platforms.npu_products import product_of

if TYPE_CHECKING:
    import torch

_INSTALL = "install the torch_npu release that matches your torch (pip install torch_npu==<torch version>)"
_CANN = (
    "install the CANN toolkit and source its set_env.sh (it puts CANN's libraries on "
    "LD_LIBRARY_PATH), and check the driver with npu-smi info"
)


class NpuPlatform(CudaPlatform):
    """One NPU per process; HCCL between them. ``torch.npu`` has the shape of ``torch.cuda``."""

    name = "npu"
    device_type = "npu"
    backend = "hccl"
    mapped_by_kernels_only = True

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

    def facts(self) -> dict[str, Any]:
        """The product, the limits of its operators, and the environment beside what is recommended."""
        product = product_of(self.device_name())
        return {"product": product.name, "limits": product.limits(), "environment": environment()}

    def empty_pinned(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        """torch_npu's pinned memory; whatever it rounds the size up to is not seen."""
        import torch

        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)

    def release_pinned(self) -> None:
        """torch_npu keeps it."""

    def empty_mapped(self, size: Sequence[int], dtype: torch.dtype, owner: object) -> torch.Tensor:
        """torch_npu's swapped memory: the driver's, not the pool's."""
        swapped: torch.Tensor = _torch_npu().empty_with_swapped_memory(
            list(size), dtype=dtype, device=self.device
        )
        return swapped

    def read_mapped(self, mapped: torch.Tensor) -> torch.Tensor:
        """A copy on the host, by way of the device: swapped memory is no source of a copy.

        The factor of a tensor of the device is the form in which torch_npu's manual reads it.
        """
        import torch

        return torch.ones(mapped.shape, dtype=mapped.dtype, device=mapped.device).mul_(mapped).cpu()

    def write_mapped(self, mapped: torch.Tensor, values: torch.Tensor) -> None:
        """By multiplication: swapped memory is no destination of a copy."""
        mapped.fill_(1).mul_(values.to(mapped.device))


def _torch_npu() -> Any:
    if find_spec("torch_npu") is None:
        raise SettingsError(f"platform npu: torch_npu is not installed; {_INSTALL}")
    try:
        return import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise SettingsError(f"platform npu: torch_npu does not load ({error}); {_CANN}") from error
