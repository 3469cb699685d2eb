"""Layers, batches and combinations that DualPipeV refuses before training, one sentence each."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

import mindspeed_dsa
from mindspeed_dsa.features import all_features
from mindspeed_dsa.features.pipeline.dualpipev.feature import (
    FEATURE,
    Options,
    check_dualpipev,
    deal_out,
    rewrite_arguments,
)
from mindspeed_dsa.features.pipeline.dualpipev.placement import (
    Reporting,
    hand_out_as_one_stage,
    last_is_first,
    report_on_last_rank,
)
from mindspeed_dsa.features.pipeline.split_backward.feature import splits_backward
from mindspeed_dsa.megatron.pipeline_chunks import Split
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.session import checks, records
from tests.support import contexts

NEW, OLD = Options(places_prediction=True, paired=False), Options(places_prediction=False, paired=False)
SERVED = {
    "schedules_method": "dualpipev",
    "dualpipev_dw_detach": False,
    "num_layers": 8,
    "pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_layout": None,
    "mtp_num_layers": 1,
    "global_batch_size": 16,
    "micro_batch_size": 1,
    "data_parallel_size": 4,
    "use_distributed_optimizer": True,
    "dist_ckpt_optim_fully_reshardable": True,
    "save": "checkpoints",
    "ckpt_format": "torch_dist",
    "cuda_graph_impl": "none",
}


def problems(options=NEW, **arguments):
    return list(check_dualpipev(Namespace(**{**SERVED, **arguments}), options))


def test_what_is_served():
    assert problems() == []
    assert problems(num_layers=5, pipeline_model_parallel_layout="Et|tt|t|tmL") == []
    assert problems(rampup_batch_size=["16", "16", "320"], global_batch_size=64) == []
    # With a batch size schedule, Megatron itself sets one microbatch for evaluations.
    scheduled = {"global_batch_size": 4, "step_batch_size_schedule": "0:16 250B:32"}
    assert problems(**scheduled, eval_global_batch_size=4, eval_micro_batch_size=1) == []
    assert problems(dualpipev_dw_detach=True, moe_fb_overlap=True, use_torch_fsdp2=True) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_model_parallel_size": 1}, "set --pipeline-model-parallel-size to 2 or more"),
        ({"num_layers": 7}, "as --pipeline-model-parallel-layout 'Et|t*2|t*2|t*2mL'"),
        (
            {"pipeline_model_parallel_layout": "Ettt|tttttmL"},
            "has 2 chunks, and 2 ranks with two chunks each need 4",
        ),
        (
            {"pipeline_model_parallel_layout": "Ett|tt|ttttm|L"},
            "end --pipeline-model-parallel-layout with mL",
        ),
        ({"pipeline_model_parallel_layout": "Ett|xx"}, "x is no kind of layer"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "omit --num-virtual-stages-per-pipeline-rank"),
        ({"num_layers_per_virtual_pipeline_stage": 2}, "omit --num-layers-per-virtual-pipeline-stage"),
        ({"decoder_last_pipeline_num_layers": 3}, "omit --decoder-last-pipeline-num-layers"),
        (
            {"global_batch_size": 12},
            "a step has 3 microbatches, and 2 pipeline ranks need at least 4; use --global-",
        ),
        (
            {"rampup_batch_size": ["4", "4", "64"]},
            "has 1 microbatch, and 2 pipeline ranks need at least 4; use --ramp",
        ),
        (
            {"global_batch_size": 4, "step_batch_size_schedule": "0:8 1B:32"},
            "need at least 4; use --step-batch-size-schedule '0:16 1B:32' or more",
        ),
        (
            {"dualpipev_dw_detach": True, "transformer_impl": "transformer_engine"},
            "use --transformer-impl local",
        ),
        ({"schedules_method": None, "dualpipev_dw_detach": True}, "a schedule that is not chosen"),
        ({"untie_embeddings_and_output_weights": False}, "add --untie-embeddings-and-output-weights"),
        ({"overlap_moe_expert_parallel_comm": True}, "use --moe-fb-overlap in place of"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        (
            {"iterations_to_skip": [5]},
            "--iterations-to-skip, which reads batches",
        ),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        ({"ckpt_format": "torch"}, "use --ckpt-format torch_dist"),
        ({"dist_ckpt_optim_fully_reshardable": False}, "add --dist-ckpt-optim-fully-reshardable"),
        ({"non_persistent_ckpt_type": "local"}, "--non-persistent-ckpt-type local saves slices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_in_one_sentence(arguments, words):
    (problem,) = problems(**arguments)
    assert words in problem
    assert "dualpipev" in problem


def test_the_loop_of_megatron_bridge_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.bridge", ModuleType("megatron.bridge"))
    assert problems() == [], "a job may convert weights with Bridge"
    loop = "megatron.bridge.training.train"
    monkeypatch.setitem(sys.modules, loop, ModuleType(loop))
    (problem,) = problems()
    assert "Megatron-Bridge's loop reads losses on the rank where the model ends" in problem


def test_multi_token_prediction_needs_a_release_that_places_it():
    (problem,) = problems(OLD)
    assert "upgrade to 0.16 or omit --mtp-num-layers" in problem
    assert problems(OLD, mtp_num_layers=None) == []


def test_layers_are_dealt_out_once():
    args = Namespace(**SERVED)
    (sentence,) = deal_out(args)
    assert args.pipeline_model_parallel_layout == "Et*2|t*2|t*2|t*2mL"
    assert args.pipeline_model_parallel_layout in sentence
    assert deal_out(args) == []
    split = Split.of(args)
    assert split is not None
    assert split.by_rank == [[(1, 2), (7, 8)], [(3, 4), (5, 6)]]


def test_megatrons_flag_has_weight_gradients_wait_as_well():
    args = Namespace(**SERVED, delay_wgrad_compute=True, transformer_impl="local", moe_fb_overlap=True)
    assert Options.of(args).split
    assert not splits_backward(args)
    _, sentence = rewrite_arguments(args)
    assert "--dualpipev-dw-detach" in sentence
    assert not args.delay_wgrad_compute
    assert rewrite_arguments(args) == []


def test_a_release_without_layouts_is_refused():
    assert FEATURE.requires.versions == {"megatron-core": ">=0.14,<0.21"}


def test_what_follows_the_order_of_another_schedule_is_named():
    by_name = {feature.name: feature for feature in all_features()}
    settings = Namespace(platform="cpu", megatron_root="megatron", chosen=dict)
    for name in ("recompute-ahead", "split-backward"):
        said = "; ".join(checks.problems([by_name[name], FEATURE], settings))
        assert name in said
        assert "order of Megatron's schedules" in said


@pytest.mark.parametrize("name", ["ascend-coc", "ascend-mc2", "moe-batch-overlap", "two-streams"])
def test_what_weight_gradients_cannot_wait_beside_is_named(name):
    other = next(feature for feature in all_features() if feature.name == name)
    settings = Namespace(platform="npu", megatron_root="megatron", chosen=dict, dualpipev_dw_detach=True)
    (said,) = checks.problems([other, FEATURE], settings)
    assert f"cannot be combined with {name}" in said
    assert "--dualpipev-dw-detach" in said
    settings.dualpipev_dw_detach = False
    assert checks.problems([other, FEATURE], settings) == []


def test_another_method_is_refused_by_name():
    with pytest.raises(SettingsError, match="schedules"):
        mindspeed_dsa.enable(schedules_method="gpipe")


def test_the_first_rank_is_handed_labels_by_releases_that_are_told_the_stage():
    # Since 0.18 the first stage of several drops the loss mask, but in DualPipeV it computes the loss.
    def stock(batch, *, pipeline_model_parallel_size=1, is_pipeline_first_stage=False, **others):
        first = pipeline_model_parallel_size > 1 and is_pipeline_first_stage
        return {**batch, "loss_mask": None} if first else batch

    told = {"pipeline_model_parallel_size": 2, "is_pipeline_first_stage": True, "tp_rank": 0}
    assert stock({"loss_mask": 1}, **told) == {"loss_mask": None}
    assert hand_out_as_one_stage(stock)({"loss_mask": 1}, **told) == {"loss_mask": 1}


def test_the_last_rank_reports_and_the_first_one_ends_the_model():
    # In release 0.19 the loss and the end of the model are found by the same function.
    utils = SimpleNamespace(is_pp_first_stage=lambda group: group.rank == 0)
    context = replace(contexts.context("dualpipev", NEW), megatron=lambda name: utils)
    is_last = last_is_first(lambda group: group.rank == group.size - 1, context)

    def ends():
        return [is_last(SimpleNamespace(rank=rank, size=2)) for rank in range(2)]

    def step():
        with context.state(Reporting).being(False):  # as the schedule does
            inside = ends()
        return inside, ends()

    assert ends() == [True, False]
    assert report_on_last_rank(step, context)() == ([True, False], [False, True])
    assert ends() == [True, False]


@pytest.mark.parametrize("release", ["0.14.0", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "main"])
def test_every_release_has_its_function_of_batches(release):
    facts_of_releases = records.load()
    name = "get_batch_on_this_tp_rank"
    served = [
        patch
        for patch in FEATURE.patches
        if patch.target.endswith(name)
        and SpecifierSet(patch.versions).contains(facts_of_releases.version(release), prereleases=True)
    ]
    (facts,) = [facts_of_releases.of(patch, release) for patch in served]
    assert facts is not None
    assert facts.exists
