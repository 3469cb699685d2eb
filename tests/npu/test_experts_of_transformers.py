"""Experts of a transformers model on an NPU: torch_npu computes all products, none falls back to the CPU."""

from __future__ import annotations

from tests.npu.device import launch

STEP = """
import torch
from mindspeed_dsa import platforms

platforms.prepare(platforms.detect("npu"))
from mindspeed_dsa.integrations.transformers import experts, apply_dsa
from tests.hosts.transformers.models import build, tokens
from tests.npu.device import counts

torch.npu.set_device(0)
ids = tokens(1, 40).npu()
losses = []
for devices in ((), ("npu",)):
    experts._DEVICES = devices
    model = build("deepseek_v32").bfloat16().npu()
    apply_dsa(model)
    with counts.counted() as found:
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
    losses.append(loss.item())
    # Two layers with experts, two products in each.
    products = [line for line in found.table().splitlines() if "_grouped_mm" in line]
    assert bool(products) == (not devices), found.table()
    theirs = "transformers/integrations/moe.py"
    assert (found.of("wait", theirs) + found.of("aicpu", theirs) > 0) == (not devices), found.table()
    assert found.of("wait", "mindspeed_dsa/") == 0, found.table()
    missing = [name for name, x in model.named_parameters() if "experts" in name and x.grad is None]
    assert not missing, missing
assert abs(losses[0] - losses[1]) < 1e-2 * losses[0], losses
"""


def test_products_stay_on_the_device(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STEP)
    launch.run(script).require_success()
