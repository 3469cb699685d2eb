"""Facts about this machine: versions, product, environment, and available torch_npu operators."""

from __future__ import annotations

from typing import Any

from mindspeed_dsa import platforms
from mindspeed_dsa.ops.npu import device as npu_device
from mindspeed_dsa.patches import versions
from mindspeed_dsa.platforms.npu import environment
from mindspeed_dsa.platforms.npu_operators import OPERATORS


def run() -> dict[str, Any]:
    """Return ``versions``, ``product`` with its ``limits``, ``environment``, and ``missing`` operators."""
    device = platforms.current().device
    product = npu_device.product()
    reasons = {each.name: npu_device.unavailable(device.type, each.name) for each in OPERATORS}
    return {
        "versions": versions.installed(),
        "product": {"name": product.name},
        "limits": product.limits(),
        "environment": environment(),
        "missing": {name: reason for name, reason in reasons.items() if reason is not None},
    }
