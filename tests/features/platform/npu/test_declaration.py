"""Redirections that are active on an NPU, by their declarations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa.features import shipped
from mindspeed_dsa.features.platform.cpu.feature import CPU
from mindspeed_dsa.features.platform.npu.feature import NPU
from mindspeed_dsa.features.platform.without_cuda.rows import ROWS

ON_THE_PLATFORM = {
    "cpu": {"cpu-platform"},
    "npu": {"npu-platform"},
    "cuda": set(),
}


@pytest.mark.parametrize("platform", ON_THE_PLATFORM)
def test_redirections_of_each_platform(platform):
    settings = SimpleNamespace(platform=platform, transformer_impl=None)
    active = {
        feature.name for feature in shipped() if feature.platform_support and feature.is_active(settings)
    }
    assert active - {"local-modules"} == ON_THE_PLATFORM[platform]


def test_rows_of_both_platforms_are_declared_once():
    assert set(CPU.patches) & set(NPU.patches) == set(ROWS)
    targets = [patch.label for patch in (*CPU.patches, *NPU.patches) if patch not in ROWS]
    assert len(targets) == len(set(targets))
