"""Search inside a job: the same bits with and without reuse, in every layout, and after an interruption."""

from __future__ import annotations

import pytest

from mindspeed_dsa.features.dsa.selection_search.greedy import Results, kept

SEARCH = "tests.features.dsa.selection_search.jobs:search"
BUILT = "tests.features.dsa.selection_search.jobs:losses_of_built_models"
ON_TWO = {"switches": {"use_fused_dsa": True, "context_parallel_size": 2}, "cp": 2}
EIGHT = {"num_layers": 8, "moe_layer_freq": [0, 1] * 4}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}


def run(pool, folder, ranks=1, **arguments):
    """Search on some ranks; all of them must have the same results, and leave nothing in the model."""
    found = pool.run(SEARCH, ranks, folder=str(folder), **arguments)
    assert [each["error"] for each in found] == [""] * ranks
    assert [each["status"] for each in found] == [0] * ranks
    assert [each["left"] for each in found] == [[]] * ranks
    first, *others = [each["results"] for each in found]
    assert all(other == first for other in others)
    assert Results.read(folder) == first
    runs = {layer: count for each in found for layer, count in each["runs"].items()}
    return first, runs, found[0]


def same_without_reuse(pool, folder, ranks=1, **arguments):
    """Search with and without reuse; return the results and both numbers of layer runs."""
    results, runs, _ = run(pool, folder / "reused", ranks, **arguments)
    plain, all_runs, _ = run(pool, folder / "plain", ranks, reuses=False, **arguments)
    assert results.losses == plain.losses
    assert results.steps == plain.steps
    return results, runs, all_runs


@pytest.mark.parametrize(
    "switches",
    [pytest.param({}, marks=pytest.mark.full), {"use_fused_dsa": True}],
    ids=["Megatron's functions", "fused"],
)
def test_reuse_changes_no_bit(pool, tmp_path, switches):
    results, runs, all_runs = same_without_reuse(pool, tmp_path, switches=switches)
    assert [step.kept for step in results.steps] == [4, 3, 2]
    assert kept(results.steps[-1].pattern) == 2
    # 7 evaluations of 2 microbatches. Of these, 4 begin above layer 1: two candidates of each step.
    assert set(all_runs.values()) == {14}
    assert runs == {1: 8, 2: 12, 3: 14, 4: 14} or sum(runs.values()) < 48


def test_losses_are_those_of_models_built_with_the_pattern(pool, tmp_path):
    results, _, _ = run(pool, tmp_path / "search")
    assert len(set(results.losses.values())) > 4, "patterns must matter"
    (built,) = pool.run(BUILT, 1, patterns=list(results.losses))
    assert built == pytest.approx(results.losses, rel=1e-6)


LAYOUTS = {
    "PP2": {"pp": 2, "microbatches": 3},
    "TP2": {"tp": 2},
    "CP2": ON_TWO,
    "DP2": {},
    "EP2": {"ep": 2},
    "PP2 x VPP2": {"pp": 2, "vpp": 2, "overrides": EIGHT, "layers_kept": 5},
}


@pytest.mark.full
@pytest.mark.parametrize("layout", [pytest.param(sizes, id=name) for name, sizes in LAYOUTS.items()])
def test_layouts_of_two_ranks(pool, tmp_path, layout):
    results, runs, all_runs = same_without_reuse(pool, tmp_path, 2, **layout)
    assert results.is_done
    assert sum(runs.values()) < sum(all_runs.values())
    if layout.get("pp"):
        firsts = [1, 3, 5, 7] if "vpp" in layout else [1, 3]
        assert results.firsts == firsts
        for pattern in results.losses:
            assert all(pattern[first - 1] == "C" for first in firsts)
    if not layout or "ep" in layout:
        assert results.identity["data_parallel_ranks"] == 2


@pytest.mark.full
def test_ranks_of_a_model_agree_with_one_process(pool, tmp_path):
    expected, _, _ = run(pool, tmp_path / "one")
    results, _, _ = run(pool, tmp_path / "two", 2, tp=2)
    assert results.losses == pytest.approx(expected.losses, rel=1e-6)
    assert [step.pattern for step in results.steps] == [step.pattern for step in expected.steps]


@pytest.mark.full
def test_multi_token_prediction_keeps_its_own_indexer(pool, tmp_path):
    plain, _, _ = run(pool, tmp_path / "plain")
    results, _, _ = run(pool, tmp_path / "MTP", overrides=MTP)
    assert results.losses == plain.losses


def test_a_killed_search_goes_on(pool, tmp_path):
    expected, _, whole = run(pool, tmp_path / "whole")
    folder = tmp_path / "killed"
    (killed,) = pool.run(SEARCH, 1, folder=str(folder), stop_after=3)
    assert killed["status"] == "killed"
    assert len(Results.read(folder).losses) == 3
    results, _, rest = run(pool, folder)
    assert rest["evaluated"] == whole["evaluated"] - 3
    assert results == expected


def test_results_of_another_checkpoint_are_refused_on_all_ranks(pool, tmp_path):
    run(pool, tmp_path / "search", layers_kept=4)
    found = pool.run(SEARCH, 2, folder=str(tmp_path / "search"), checkpoint="another", tp=2)
    for each in found:
        assert "it has checkpoint checkpoint and not another" in each["error"]


def test_results_of_other_data_are_refused(pool, tmp_path):
    run(pool, tmp_path / "search", layers_kept=4)
    (found,) = pool.run(SEARCH, 1, folder=str(tmp_path / "search"), layers_kept=4, seed=1)
    assert "it has checksum_of_data" in found["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers_kept": 1, "pp": 2}, "begin with layers 1, 3"),
        ({"layers_kept": 5, "pp": 2}, "4 of the 4 layers have an indexer"),
        ({"microbatches": 9, "tp": 2}, "data end after 4 microbatches"),
    ],
    ids=["few", "many", "data"],
)
def test_refused_in_the_job(pool, tmp_path, arguments, words):
    for each in pool.run(SEARCH, 2, folder=str(tmp_path / "search"), **arguments):
        assert words in each["error"]
