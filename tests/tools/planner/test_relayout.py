"""Layers dealt by recorded loads: as a layout, or as the nearest split that a release can express."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner import arguments, communication, memory, plan, relayout
from mindspeed_dsa.tools.planner.devices import device
from mindspeed_dsa.tools.planner.job import Job
from mindspeed_dsa.tools.planner.timing import Estimate
from tests.tools.planner.recorded_loads import EVEN, JOB, LAYERS, MODEL, ONE, hot, write

VPP = "--num-layers 24 --num-virtual-stages-per-pipeline-rank 3"
V = (
    "--schedules-method dualpipev --pipeline-model-parallel-layout Et|tt|t|tt|t|tt|t|ttL"
    " --transformer-impl local"
)
PP = "--pipeline-model-parallel-size 4 --expert-model-parallel-size 4"


def job(folder: Path, more: str = "") -> Job:
    return arguments.job_of(f"{JOB} {more}".split(), 16, expert_load=folder)


def _layers(more: str) -> int:
    return 24 if more == VPP else LAYERS


@pytest.mark.parametrize("more", ["", VPP, V, "--mtp-num-layers 1"], ids=["plain", "interleaved", "V", "MTP"])
def test_times_of_layers_add_up_to_those_of_stages(tmp_path, more):
    own, cpu = job(hot(tmp_path, _layers(more) + ("mtp" in more)), more), device("cpu")
    dealing = relayout.times(own, cpu)
    sizes = relayout.sizes_of(own, own.layout)
    ranks = memory.of_job(own, 0.05)
    stages = Estimate(own, cpu, ranks, communication.of_job(own)).stages()
    expected = [sum(stage.forward + stage.backward for stage in each) for each in stages]
    assert dealing.ranks_of(sizes) == pytest.approx(expected)
    assert dealing.last > dealing.first


@pytest.mark.parametrize("more", ["", VPP, V], ids=["plain", "interleaved", "V"])
def test_the_hot_layer_gets_a_short_stage(tmp_path, more):
    dealt = relayout.deal(job(hot(tmp_path, _layers(more)), more), device("cpu"), "0.16.1")
    before, after = (each.job.layout for each in (dealt.before, dealt.after))
    slowest = [
        max(dealt.dealing.stages(relayout.sizes_of(dealt.before.job, each))) for each in (before, after)
    ]
    assert slowest[1] < slowest[0]
    assert dealt.after.time.total < dealt.before.time.total
    assert (after.pp, after.vpp, after.ep, after.v_shaped) == (
        before.pp,
        before.vpp,
        before.ep,
        before.v_shaped,
    )
    assert not dealt.wanted


def test_the_printed_command_line_plans_the_same_step(tmp_path, capsys):
    options = ["plan", "--devices", "16", "--device", "cpu", "--expert-load", str(hot(tmp_path, 24))]
    file = tmp_path / "found.json"
    assert main([*options, "--search", "--json", str(file), "--", *f"{JOB} {VPP}".split()]) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "--pipeline-model-parallel-layout" in said
    assert "times as fast with" in said
    assert "--num-virtual-stages-per-pipeline-rank" not in found["after"]["flags"]
    assert max(found["stages"]["after"]) < max(found["stages"]["before"])
    words = found["after"]["flags"].replace("'", "").split()
    assert main([*options, "--json", str(file), "--", *words]) == 0
    assert json.loads(file.read_text())["step"] == found["after"]["step"]


def test_a_split_that_is_best_stays(tmp_path, capsys):
    even = write(tmp_path, dict.fromkeys(range(1, LAYERS + 1), EVEN))
    dealt = relayout.deal(
        replace(job(even), model=replace(job(even).model, vocabulary=64)), device("cpu"), "0.16.1"
    )
    assert dealt.after is dealt.before
    assert "no dealt split fits and has a faster step: the job's flags stay" in relayout.text(
        dealt, JOB.split()
    )


def test_releases_without_layouts_get_the_nearest_split(tmp_path):
    """No other numbers of layers in the first and last stage make the slowest stage faster."""
    own = job(write(tmp_path, {layer: ONE if layer < 4 else EVEN for layer in range(1, LAYERS + 1)}))
    dealt = relayout.deal(own, device("cpu"), "0.13.1")
    layout = dealt.after.job.layout
    assert not layout.stages
    slowest = max(dealt.dealing.stages(relayout.sizes_of(own, layout)))
    for first in range(1, 10):
        for last in range(1, 11 - first):
            middle, rest = divmod(LAYERS - first - last, 2)
            if not rest and middle:
                assert slowest <= max(dealt.dealing.stages((first, middle, middle, last))) * (1 + 1e-12)
    said = relayout.text(dealt, JOB.split())
    assert "--decoder-first-pipeline-num-layers" in said
    assert "Megatron-core 0.13.1 has no --pipeline-model-parallel-layout" in " ".join(said.split())
    assert "+".join(map(str, dealt.wanted)) in said


def test_stages_begin_with_layers_that_select(tmp_path):
    more = (
        "--multi-latent-attention --experimental-attention-variant dsa --use-fused-dsa --kv-lora-rank 64 "
        "--qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 --dsa-indexer-n-heads 4 "
        "--dsa-indexer-head-dim 32 --dsa-indexer-topk 64 --dsa-indexer-topk-freq 2 "
        "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2"
    )
    own = job(hot(tmp_path), more)
    dealt = relayout.deal(own, device("cpu"), "0.16.1")
    assert any(dealt.dealing.begins)
    assert not all(dealt.dealing.begins)
    sizes = relayout.sizes_of(own, dealt.after.job.layout)
    assert all(own.model.kinds[sum(sizes[:stage])].selects for stage in range(4))


def test_the_new_split_fits_if_the_own_one_does(tmp_path):
    """The first ranks keep the activations of the most microbatches, and may not take another layer."""
    loads = {layer: EVEN if layer < 10 else ONE for layer in range(1, LAYERS + 1)}
    own, cpu = job(write(tmp_path, loads), "--seq-length 2048"), device("cpu", reserve=0.0)
    free = relayout.deal(own, cpu, "0.16.1")
    small = replace(cpu, memory=free.before.worst.total / memory.GIB * 1.001)
    assert free.after.worst.total > free.before.worst.total * 1.01
    dealt = relayout.deal(own, small, "0.16.1")
    assert dealt.before.fits
    assert dealt.after.fits
    assert dealt.after.time.total < dealt.before.time.total
    assert relayout.deal(own, small, "0.13.1").after.fits


def test_layers_of_multi_token_prediction_are_not_alone(tmp_path):
    """Megatron builds them like the last decoder layer of their stage."""
    more = "--vocab-size 400000"
    dense = relayout.times(job(hot(tmp_path / "dense"), more), device("cpu"))
    predicting = job(hot(tmp_path / "more", LAYERS + 1), f"{more} --mtp-num-layers 1")
    assert (dense.best() or ())[-1:] == (0,)
    assert (relayout.times(predicting, device("cpu")).best() or ())[-1:] == (1,)


def test_flags_of_a_configs_model_are_printed(tmp_path, capsys):
    loads = dict.fromkeys(range(4, 62), [100] * 255 + [9000])
    flags = "--pipeline-model-parallel-size 2 --expert-model-parallel-size 8 --seq-length 4096"
    batch = "--micro-batch-size 1 --global-batch-size 64 --decoder-last-pipeline-num-layers 30"
    options = ["--config", "deepseek-v3.2", "--search", "--expert-load", str(write(tmp_path, loads))]
    main(["plan", *options, "--", *flags.split(), *batch.split(), "--mtp-num-layers", "0"])
    assert "in training add the flags of deepseek-v3.2" in capsys.readouterr().out


def test_one_stage_has_nothing_to_deal(tmp_path):
    alone = arguments.job_of(f"{MODEL} --expert-model-parallel-size 4".split(), 4, expert_load=hot(tmp_path))
    with pytest.raises(SettingsError, match="this job has one stage; set --pipeline-model-parallel-size"):
        relayout.deal(alone, device("cpu"), "0.16.1")


def test_too_many_replicas_for_a_v_leave_no_suggestion(tmp_path):
    """Devices that fit are sought with more replicas, which leave a V fewer microbatches than it needs."""
    small = replace(device("cpu"), memory=1e-3)
    assert plan.make(job(hot(tmp_path), V), small).fitting is None
