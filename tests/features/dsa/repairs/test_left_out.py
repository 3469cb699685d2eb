"""``--no-dsa-repairs`` omits the repairs that it names, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa.features import all_flags
from mindspeed_dsa.features.dsa.repairs.feature import FEATURE, LEFT_OUT
from mindspeed_dsa.features.dsa.repairs.rows import PADDED_BUCKETS, REPAIRS
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.settings import read


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


def test_fused_rope_is_left_alone_without_the_dispatcher(monkeypatch):
    monkeypatch.setattr("mindspeed_dsa.patches.versions.of_megatron", lambda root: "0.16.1")
    args = SimpleNamespace(experimental_attention_variant="dsa", apply_rope_fusion=True)
    args.no_dsa_repairs = "spec-dispatch"
    assert not FEATURE.rewrite(args)
    assert args.apply_rope_fusion


@pytest.mark.parametrize("said", ["argv", "environment", "API"])
def test_an_unknown_repair_is_refused(said):
    names = "hadamard, loss-scal"
    sources = {
        "argv": {"argv": ["--no-dsa-repairs", names]},
        "environment": {"environ": {LEFT_OUT.env: names}},
        "API": {"api": {LEFT_OUT.dest: names}},
    }[said]
    with pytest.raises(SettingsError, match="no repair is called loss-scal; choose among local-provider, "):
        read(all_flags(), **{"environ": {}, **sources})


def test_spaces_between_names_are_ignored():
    assert (
        read(all_flags(), api={LEFT_OUT.dest: "hadamard, loss-gate"}, environ={}).no_dsa_repairs
        == "hadamard,loss-gate"
    )


NEVER_A_SWITCH = {PADDED_BUCKETS.name, "absorbed-adapters"}


@pytest.mark.parametrize(
    "repair", [each for each in REPAIRS if each.name not in NEVER_A_SWITCH], ids=lambda repair: repair.name
)
def test_former_switches_are_refused_with_the_way_out(repair):
    with pytest.raises(SettingsError, match=f"use --no-dsa-repairs {repair.name}"):
        read(all_flags(), argv=[f"--no-dsa-{repair.name}"], environ={})
    with pytest.raises(SettingsError, match=f"--no-dsa-repairs {repair.name} leaves it out"):
        read(all_flags(), api={f"dsa_{repair.name.replace('-', '_')}": False}, environ={})
