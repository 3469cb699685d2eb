from __future__ import annotations

from packaging.specifiers import SpecifierSet

from mindspeed_dsa import settings
from mindspeed_dsa.features import all_features, all_flags
from mindspeed_dsa.session import checks

CASES = "tests.features.dsa.parts_of_dsa"
OURS = [feature for feature in all_features() if feature.name.startswith("dsa-")]
NAMES = [feature.name for feature in OURS]
FUSED = {"dsa-absorb", "dsa-stage", "dsa-warmup", "dsa-kernel-backend", "dsa-context-parallel"}
FUSED |= {"dsa-recorded-selections", "dsa-selection-search"}


def test_every_row_of_this_release_is_applied_and_undone(pool):
    switches = {"dsa_indexer_rope_first": True, "dsa_indexer_normalised_query": True}
    switches |= {"use_fused_dsa": True, "dsa_stage": "warmup", "context_parallel_size": 2}
    switches |= {"dsa_replay_selections": "batch"}
    (result,) = pool.run(f"{CASES}:arm_and_undo", 1, switches=switches)
    states = {(site["target"], site["state"]) for site in result["sites"]}
    for feature in OURS:
        for patch in feature.patches:
            here = "0.16.1" in SpecifierSet(patch.versions)
            # Other packages' modules are not imported in this job.
            expected = "applied" if patch.label.startswith("megatron.") else "pending"
            assert (patch.label, expected if here else "skipped") in states
    changed = result["changed by enable"]
    assert {"multi_latent_attention:Linear", "dsa:rotate_activation", "moe.router:router_gating_linear"} <= {
        name.removeprefix("megatron.core.transformer.").removeprefix("experimental_attention_variant.")
        for name in changed
    }, "names that callers hold have changed"
    assert result["still changed after disable"] == []


def test_repairs_are_on_where_the_model_uses_dsa(pool):
    (default,) = pool.run(f"{CASES}:active_features", 1, switches={"experimental_attention_variant": "dsa"})
    assert set(NAMES) - set(default) == FUSED
    (other,) = pool.run(f"{CASES}:active_features", 1, switches={})
    assert not set(NAMES) & set(other)


def test_nothing_is_refused_by_a_release_that_needs_none_of_it(monkeypatch):
    monkeypatch.setattr("mindspeed_dsa.patches.versions.of_distribution", lambda *args: "0.19.0")
    chosen = settings.read([*settings.GENERAL_FLAGS, *all_flags()], api={}, argv=())
    chosen.platform = "cpu"
    refused = {feature.name: checks.problems([feature], chosen) for feature in OURS}
    assert not any(refused.values())
