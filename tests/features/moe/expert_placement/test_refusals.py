"""Settings that a placement does not fit, and checkpoints that do not number experts."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from mindspeed_dsa.features.moe.expert_placement import placing
from mindspeed_dsa.features.moe.expert_placement.feature import Options, check_expert_placement
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.runs import expert_load, expert_placement, metrics
from mindspeed_dsa.runs.expert_load import LayerLoad
from mindspeed_dsa.runs.expert_placement import Placement
from mindspeed_dsa.runs.files import RunError
from tests.support.contexts import context


def problems(tmp_path, placement=None, **arguments):
    file = tmp_path / "placement.json"
    expert_placement.write(file, placement or Placement(4, 2, {2: [0, 2, 1, 3], 3: [3, 2, 1, 0]}))
    settings = {
        "moe_expert_placement": str(file),
        "num_experts": 4,
        "expert_model_parallel_size": 2,
        "num_layers": 3,
        "moe_layer_freq": [0, 1, 1],
        "mtp_num_layers": None,
        **arguments,
    }
    return list(check_expert_placement(SimpleNamespace(**settings), None))


def test_a_placement_of_this_model_is_accepted(tmp_path):
    assert problems(tmp_path) == []
    assert problems(tmp_path, moe_expert_placement="auto") == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_experts": 8}, "4 experts, and --num-experts is 8"),
        ({"expert_model_parallel_size": 4}, "2 expert parallel ranks, and --expert-model-parallel-size is 4"),
        ({"num_layers": 2, "moe_layer_freq": [0, 1]}, r"layers \[3\], and --num-layers .* makes 2"),
        ({"moe_layer_freq": 1}, r"no layers \[1\], which --num-layers and --moe-layer-freq"),
    ],
)
def test_a_placement_of_another_model_is_refused_in_one_message(tmp_path, arguments, said):
    (problem,) = problems(tmp_path, **arguments)
    assert "is of another model" in problem
    assert re.search(said, problem), problem


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ckpt_format": "torch"}, "--ckpt-format torch knows experts by their place"),
        ({"ckpt_format": "fsdp_dtensor"}, "--ckpt-format fsdp_dtensor"),
        ({"ckpt_convert_format": "torch"}, "--ckpt-convert-format torch"),
        ({"non_persistent_ckpt_type": "local"}, "--non-persistent-ckpt-type local"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"fp8": "e4m3", "fp8_param_gather": True}, "omit --fp8-param-gather"),
        ({"moe_use_upcycling": True}, "--moe-use-upcycling"),
        (
            {
                "use_distributed_optimizer": True,
                "save": "x",
                "no_save_optim": None,
                "dist_ckpt_optim_fully_reshardable": False,
            },
            "dp_reshardable.*add --dist-ckpt-optim-fully-reshardable",
        ),
        (
            {"use_distributed_optimizer": True, "save": "x", "ckpt_fully_parallel_save": False},
            "--no-ckpt-fully-parallel-save .* saved by places in a rank's buffers; omit that",
        ),
        ({"num_experts": None}, "has no experts"),
        ({"hybrid_override_pattern": "M*ME"}, "not those of --hybrid-override-pattern; omit one"),
    ],
)
def test_checkpoints_that_go_by_places_are_refused_by_name(tmp_path, arguments, said):
    (problem,) = problems(tmp_path, **arguments)
    assert re.search(said, problem), problem


@pytest.mark.parametrize("kind", ["dp_reshardable", "dp_zero_gather_scatter", "fully_sharded_bucket_space"])
def test_optimizer_state_by_buckets_is_neither_saved_nor_loaded(kind):
    wrapped = placing.refuse_buckets(lambda *args, **kwargs: "state", context("moe-expert-placement"))
    # Saving names the kind in metadata; loading, in an argument.
    for how in ({"metadata": {"distrib_optim_sharding_type": kind}}, {"sharding_type": kind}):
        with pytest.raises(MindSpeedDSAError, match=f"as {kind}: .*fully-reshardable"):
            wrapped(None, {}, is_loading=True, **how)
    assert wrapped(None, {}, metadata={"distrib_optim_sharding_type": "fully_reshardable"}) == "state"
    assert wrapped(None, {}) == "state"


def test_a_checkpoint_of_ranks_is_refused_when_it_is_found():
    def load(kind):
        return lambda *args, **kwargs: ({}, "iter_1", False, SimpleNamespace(name=kind))

    placement_context = context("moe-expert-placement")
    assert placing.refuse_files_of_ranks(load("GLOBAL"), placement_context)()[1] == "iter_1"
    with pytest.raises(MindSpeedDSAError, match="iter_1 is of the kind legacy"):
        placing.refuse_files_of_ranks(load("LEGACY"), placement_context)()


def test_auto_takes_the_first_report_there_is_or_says_that_there_is_none(tmp_path, caplog):
    empty, run = tmp_path / "empty", tmp_path / "run"
    settings = SimpleNamespace(
        moe_expert_placement="auto",
        moe_router_load_report=str(empty),
        load=str(run / "checkpoints"),
        save=None,
    )
    placement_context = context("moe-expert-placement", Options.of(settings))
    with caplog.at_level("INFO", logger="mindspeed_dsa"):
        assert placing._read(placement_context, 2) is None
    assert f"there is no report of experts' load (looked in {empty}," in caplog.text
    for step, hot in enumerate([[0, 0, 9, 9], *[[9, 9, 1, 1]] * 100]):  # only recent steps count
        metrics.append(run / expert_load.FILE, expert_load.record(step, [LayerLoad(2, 0, hot, [hot])]))
    with caplog.at_level("INFO", logger="mindspeed_dsa"):
        placement = placing._read(placement_context, 2)
    assert placement == Placement(4, 2, {2: [0, 2, 1, 3]})
    assert "layer 2: most loaded rank over the mean 1.80 -> 1.00" in caplog.text


def test_auto_goes_on_from_a_report_that_a_kill_has_torn(tmp_path, caplog):
    placement_context = context(
        "moe-expert-placement",
        Options.of(
            SimpleNamespace(
                moe_expert_placement="auto", moe_router_load_report=str(tmp_path), load=None, save=None
            )
        ),
    )
    file = tmp_path / expert_load.FILE
    # A record that a kill has cut off.
    file.write_text('{"step": 1, "layers": [{"la')
    assert placing._read(placement_context, 2) is None  # the only record is torn, so there is none
    for step in (1, 2):
        metrics.append(file, expert_load.record(step, [LayerLoad(2, 0, [9, 9, 1, 1], [[18, 2]])]))
    # The first record is damaged and the last one cut off, so one is left.
    file.write_text(file.read_text().replace('"step": 1', '"pets": 1') + '{"step": 3, "lay')
    with caplog.at_level("INFO", logger="mindspeed_dsa"):
        assert placing._read(placement_context, 2) == Placement(4, 2, {2: [0, 2, 1, 3]})
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert sum("1 lines among the last" in each for each in warnings) == 1


def test_auto_refuses_a_file_that_is_no_report(tmp_path):
    placement_context = context(
        "moe-expert-placement",
        Options.of(
            SimpleNamespace(
                moe_expert_placement="auto", moe_router_load_report=str(tmp_path), load=None, save=None
            )
        ),
    )
    (tmp_path / expert_load.FILE).write_text("notes\n")
    with pytest.raises(RunError, match="is not a report of --moe-router-load-report"):
        placing._read(placement_context, 2)
