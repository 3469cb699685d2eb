"""``--no-dsa-repairs`` leaves out the repairs that it names, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa.features import all_flags
from mindspeed_dsa.features.dsa.repairs.feature import FEATURE
from mindspeed_dsa.features.dsa.repairs.rows import REPAIRS
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.settings import REMOVED, read


def test_named_repairs_are_left_out():
    chosen = SimpleNamespace(no_dsa_repairs="hadamard,loss-scale")
    kept = FEATURE.patches_for(chosen)
    gone = {
        patch.label
        for repair in REPAIRS
        if repair.name in ("hadamard", "loss-scale")
        for patch in repair.patches
    }
    assert gone
    assert gone.isdisjoint(patch.label for patch in kept)
    assert len(kept) + len(gone) == len(FEATURE.patches) == len(FEATURE.patches_for(SimpleNamespace()))


def test_an_unknown_repair_is_refused():
    with pytest.raises(SettingsError, match="no repair is called loss-scal; choose among local-provider, "):
        FEATURE.patches_for(SimpleNamespace(no_dsa_repairs="hadamard,loss-scal"))


@pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: repair.name)
def test_former_switches_are_refused_with_the_way_out(repair):
    with pytest.raises(SettingsError, match=f"use --no-dsa-repairs {repair.name}"):
        read(all_flags(), argv=[f"--no-dsa-{repair.name}"], environ={})
    assert f"--dsa-{repair.name}" in REMOVED
