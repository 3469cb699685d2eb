"""FSDP2 with a tiny bf16 model with experts: sums, norms, shards and checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa.features.data_parallel.fsdp2 import wrapper
from mindspeed_dsa.features.data_parallel.fsdp2.checkpoint import count_in_all
from mindspeed_dsa.features.data_parallel.fsdp2.feature import Options
from tests.support import contexts

CASES = "tests.features.data_parallel.fsdp2.beside_ddp"


SWAPPED = {"swap_optimizer": True}
MAPPED = {"virtual_optimizer": ["all"]}


@pytest.mark.parametrize(
    ("world_size", "sharding_size", "switches"),
    [
        pytest.param(2, None, {}, marks=pytest.mark.full),
        (2, None, SWAPPED),
        pytest.param(4, 2, {}, marks=pytest.mark.full),
        pytest.param(4, None, {}, marks=pytest.mark.full),
        pytest.param(4, 2, SWAPPED, marks=pytest.mark.full),
        pytest.param(2, None, MAPPED, marks=pytest.mark.full),
    ],
)
def test_checkpoints_go_from_ddp_and_back_and_resume(pool, tmp_path, world_size, sharding_size, switches):
    arguments = {"folder": str(tmp_path), "sharding_size": sharding_size, **switches}
    ranks = pool.run(f"{CASES}:life", world_size, **arguments)
    for rank in ranks:
        for with_ddp, sharded in rank["records"]:
            assert sharded["successful"]
            assert sharded["loss"] == pytest.approx(with_ddp["loss"], rel=2e-3), (
                "bf16 weights that began equal"
            )
        first, ours = (record["norm"] for record in rank["records"][0])
        assert ours == pytest.approx(first, rel=1e-6), "sums in fp32, each gradient counted once"
        assert rank["unequal"] == {"ddp to fsdp2": [], "fsdp2 to ddp": [], "resumed": []}
        # The sharding size limits the number of shards; other ranks hold replicas.
        pieces = sharding_size or world_size
        assert rank["share"] == 1 / pieces
        assert rank["dims"] == {0, 1}, "odd numbers of rows, and six of them in quarters"
        assert rank["units"] == [
            *("FSDPFloat16Module", "FSDPLanguageModelEmbedding"),
            *("FSDPTransformerLayer", "FSDPColumnParallelLinear"),
        ]
        assert 0 < rank["whole"] < rank["of"] / 2, "experts, and what has no equal pieces"
    with_ddp, sharded = ranks[0]["contents"]
    assert sharded == with_ddp, "the same keys and shapes"


EXPERTS = {"fsdp2_shard_experts": True}
GROUPED = {**EXPERTS, "moe_grouped_gemm": True}


@pytest.mark.parametrize(
    ("world_size", "ep", "sharding_size", "switches", "cut"),
    [
        # cut: the sharded dimension and the number of shards.
        (4, 2, None, EXPERTS, (0, 2)),
        pytest.param(2, 1, None, EXPERTS, (0, 2), marks=pytest.mark.full),
        pytest.param(4, 2, None, {**GROUPED, **SWAPPED}, (2, 2), marks=pytest.mark.full),
        pytest.param(4, 1, 2, GROUPED, (0, 2), marks=pytest.mark.full),
        pytest.param(4, 2, 2, EXPERTS, (-1, 1), marks=pytest.mark.full),
        # Two experts: as many stacked weights as matrices.
        pytest.param(4, 2, None, {**GROUPED, "num_experts": 2}, (2, 2), marks=pytest.mark.full),
    ],
    ids=[
        *("EP2 x EDP2", "DP2", "grouped, three in halves", "grouped, sharding size 2"),
        *("no two share a copy", "grouped, one on a rank"),
    ],
)
def test_experts_are_cut_over_the_ranks_with_the_same_ones(
    pool, tmp_path, world_size, ep, sharding_size, switches, cut
):
    arguments = {"folder": str(tmp_path), "sharding_size": sharding_size, "ep": ep, **switches}
    ranks = pool.run(f"{CASES}:life", world_size, **arguments)
    for rank in ranks:
        for with_ddp, sharded in rank["records"]:
            assert sharded["loss"] == with_ddp["loss"], "sums of two or four numbers in fp32"
            assert sharded["norm"] == pytest.approx(with_ddp["norm"], rel=1e-6), "each gradient counted once"
        assert rank["unequal"] == {"ddp to fsdp2": [], "fsdp2 to ddp": [], "resumed": []}
        assert rank["experts"] == {cut}
        assert rank["bytes of experts"] == 1 / cut[1]
    with_ddp, sharded = ranks[0]["contents"]
    assert sharded == with_ddp, "the same keys and shapes"


@pytest.mark.parametrize("stage", ["warmup", pytest.param("sparse", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "switches", [{"use_fused_dsa": True}, pytest.param({}, marks=pytest.mark.full)], ids=["fused", "stock"]
)
def test_indexers_learn_beside_layers_that_are_frozen(pool, stage, switches):
    # FSDP2 gathers a layer for backward only if its output requires a gradient.
    for rank in pool.run(f"{CASES}:indexers_alone", 2, stage=stage, **switches):
        for with_ddp, sharded in rank["records"]:
            assert sharded["loss"] == pytest.approx(with_ddp["loss"], rel=1e-5)
            assert sharded["norm"] == pytest.approx(with_ddp["norm"], rel=1e-5)
        assert any(".indexer." in name for name in rank["changed"])
        if stage == "warmup":
            assert all(".indexer." in name for name in rank["changed"])
        assert rank["unequal"] == []


@pytest.mark.full
def test_experts_without_tokens_take_part(pool):
    ranks = pool.run(f"{CASES}:idle_experts", 4, **EXPERTS)
    for rank in ranks:
        for before, after in rank["records"]:
            assert after["loss"] == before["loss"]
            assert after["norm"] == pytest.approx(before["norm"], rel=1e-6)
        # Some experts got no tokens, and their moments are still zero.
        assert 0 in rank["moments"]
    idle = [set(rank["moments"]) == {0} for rank in ranks]
    assert idle in ([False, True] * 2, [True, False] * 2), "of every other rank all experts"


@pytest.mark.full
@pytest.mark.parametrize("switches", [EXPERTS, GROUPED])
def test_checkpoints_of_sharded_experts_go_from_the_distributed_optimizer_and_back(pool, tmp_path, switches):
    arguments = {"folder": str(tmp_path), "precision": "bf16", **switches}
    for rank in pool.run(f"{CASES}:exchange", 4, **arguments):
        assert rank["unequal"] == [[], []]
        whole, again, sharded = rank["records"]
        assert again == whole
        assert sharded["norm"] == pytest.approx(whole["norm"], rel=1e-6)


def test_a_gradient_that_was_not_summed_stops_the_first_step(pool):
    for said in pool.run(f"{CASES}:late_gradients", 2):
        assert "a gradient has not been summed over ranks" in said


def test_gradients_that_are_nan_stop_the_job_before_the_optimizers_step(pool):
    for said in pool.run(f"{CASES}:undefined_gradients", 2):
        assert "found NaN in the norm of this rank's shards of gradients" in said


@pytest.mark.parametrize("wanted", [True, False, None])
def test_the_jobs_arguments_say_whether_gradients_are_checked(wanted):
    context = contexts.context("torch-fsdp2", Options())
    given = {} if wanted is None else {"check_for_nan_in_loss_and_grad": wanted}
    alone = {"pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1}
    wrapper.validate_beside_experts_and_pipelines(lambda args: None, context)(
        SimpleNamespace(**alone, **given)
    )
    assert context.state(wrapper.CheckedGradients).wanted is bool(wanted)


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "switches"),
    [
        ("bf16", {}),
        pytest.param("fp32", {}, marks=pytest.mark.full),
        pytest.param("fp32", SWAPPED, marks=pytest.mark.full),
    ],
)
def test_checkpoints_go_from_the_distributed_optimizer_and_back(pool, tmp_path, precision, switches):
    arguments = {"folder": str(tmp_path), "precision": precision, **switches}
    for rank in pool.run(f"{CASES}:exchange", 2, **arguments):
        assert rank["unequal"] == [[], []], "weights, master weights and moments, in all three checkpoints"
        whole, again, sharded = rank["records"]
        assert again == whole
        assert rank["states"][0] == rank["states"][1]
        assert sharded["norm"] == pytest.approx(whole["norm"], rel=1e-6)
        assert rank["steps"] == {3}
        assert "distributed optimizer's state as dp_reshardable" in rank["refused"]
        assert "--dist-ckpt-optim-fully-reshardable" in rank["refused"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "way", "switches"),
    [
        ("bf16", "fully_reshardable", {}),
        pytest.param("bf16", "fully_reshardable", EXPERTS, marks=pytest.mark.full),
        pytest.param("bf16", "torch_dist", GROUPED, marks=pytest.mark.full),
        pytest.param("bf16", "torch_dist", {}, marks=pytest.mark.full),
        pytest.param("fp32", "torch_dist", SWAPPED, marks=pytest.mark.full),
        pytest.param("fp32", "fully_reshardable", {}, marks=pytest.mark.full),
    ],
)
def test_a_first_stage_without_experts_leaves_those_of_others_their_state(
    pool, tmp_path, precision, way, switches
):
    arguments = {"folder": str(tmp_path), "precision": precision, "way": way, **switches}
    # Experts are only sharded where two ranks of a stage hold the same ones, hence four ranks.
    size = 4 if "fsdp2_shard_experts" in switches else 2
    ranks = pool.run(f"{CASES}:stages", 2 * size, **arguments)
    # Parameters of the second optimizer, which is the experts' one.
    assert [rank["numbers"][1] for rank in ranks[:size]] == [0] * size
    assert all(rank["numbers"][1] > 0 for rank in ranks[size:])
    for rank in ranks:
        unbroken, resumed = rank["norms"]
        assert resumed == unbroken
        assert rank["states"][0] == rank["states"][1], "weights, masters and moments after the next step"


@pytest.mark.full
def test_so_do_checkpoints_of_ddp(pool, tmp_path):
    assert pool.run(f"{CASES}:stages_of_ddp", 4, timeout_s=60, folder=str(tmp_path)) == [[]] * 4


def test_an_optimizer_that_counts_in_its_groups_goes_on_where_rank_0_counted_nothing():
    """Optimizers that keep ``step`` in their param groups resume with the count of any rank that has one."""
    # Fused optimizers skip groups without parameters, and would restart where a count is missing.
    chain = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=object()) for _ in range(2)])
    states = {
        number: {"optimizer": {"state": {}, "param_groups": groups}}
        # Groups of two optimizers; the second one's parameters are on other ranks.
        for number, groups in enumerate(([{"step": 3}, {"step": 3}], [{}, {"step": None}]))
    }
    loaded = []
    count_in_all(lambda self, found: loaded.append(found))(chain, states)
    for state in loaded[0].values():
        assert state["optimizer"] == {"state": {}, "param_groups": [{"step": 3}] * 2}


def test_a_sharding_size_that_does_not_divide_is_refused(pool):
    (said, _) = pool.run(f"{CASES}:refusal", 2, fsdp2_sharding_size=3)
    assert said.startswith(
        "SettingsError: fsdp2: --fsdp2-sharding-size 3 must be 2 or more and divide the 2 ranks"
    )
