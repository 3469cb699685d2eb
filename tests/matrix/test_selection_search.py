"""Search for the layers that need an indexer, on every release."""

from __future__ import annotations

import pytest

from mindspeed_dsa.features.dsa.selection_search.greedy import kept

pytestmark = pytest.mark.releases(">=0.12.1")

JOBS = "tests.features.dsa.selection_search.jobs"
EIGHT = {"num_layers": 8, "moe_layer_freq": [0, 1] * 4}


@pytest.mark.parametrize("switches", [{}, {"use_fused_dsa": True}], ids=["Megatron's functions", "fused"])
def test_reuse_changes_no_bit_and_losses_are_those_of_built_models(pool, tmp_path, switches):
    (result,) = pool.run(f"{JOBS}:search", 1, folder=str(tmp_path / "reused"), switches=switches)
    (plain,) = pool.run(f"{JOBS}:search", 1, folder=str(tmp_path / "plain"), switches=switches, reuses=False)
    assert (result["status"], result["error"], result["left"]) == (0, "", [])
    losses = result["results"].losses
    assert losses == plain["results"].losses
    assert kept(result["results"].steps[-1].pattern) == 2
    assert sum(result["runs"].values()) < sum(plain["runs"].values())
    (built,) = pool.run(f"{JOBS}:losses_of_built_models", 1, patterns=list(losses))
    assert built == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    "layout",
    [{"pp": 2, "vpp": 2, "overrides": EIGHT, "layers_kept": 6}, {"tp": 2}],
    ids=["PP2 x VPP2", "TP2"],
)
def test_layouts(pool, tmp_path, layout):
    reused = pool.run(f"{JOBS}:search", 2, folder=str(tmp_path / "reused"), **layout)
    plain = pool.run(f"{JOBS}:search", 2, folder=str(tmp_path / "plain"), reuses=False, **layout)
    assert [each["error"] for each in (*reused, *plain)] == [""] * 4
    assert all(each["results"] == plain[0]["results"] for each in (*reused, *plain))
