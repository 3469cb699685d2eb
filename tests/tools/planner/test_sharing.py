"""Plans of models whose layers share selections, compared with independent arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner import (
    arguments,
    communication,
    configs,
    flags,
    layouts,
    memory,
    search,
    sizes,
    timing,
    work,
)
from mindspeed_dsa.tools.planner import (
    devices as devices,
)

GLM = (
    "pretrain_gpt.py --seq-length 8192 --micro-batch-size 1 --bf16 --use-fused-dsa "
    "--dsa-indexer-loss-coeff 0.01 --use-distributed-optimizer --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
)
SELECTING = [1, 2, *range(3, 79, 4)]
"""Selecting layers of GLM-5.2, counted from 1."""
SLIME = (
    "--pipeline-model-parallel-size 8 --decoder-first-pipeline-num-layers 14 "
    "--decoder-last-pipeline-num-layers 16"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CORE = "--recompute-granularity selective --recompute-modules core_attn"
TOKENS, TOPK = 8192, 2048


def glm(more: str = "", model: str = "glm-5.2", count: int | None = None):
    return arguments.job_of(f"{GLM} {more}".split(), count, model)


# -- sizes of models ---------------------------------------------------------------------------


def test_glm_has_the_parameters_that_are_published():
    by_part = {
        name: sizes.by_part(sizes.model_weights(glm(model=name).model)) for name in ("glm-5", "glm-5.2")
    }
    index = 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128  # queries, keys and weights, and the key's norm
    assert by_part["glm-5"]["indexer"] == 78 * index
    assert by_part["glm-5.2"]["indexer"] == 21 * index
    heads = 64 * (192 + 64 + 192 + 256 + 256)  # query, key and value from their latents, and the output
    assert heads == 61440
    attention = (
        6144 * 2048 + 2048 * 64 * (192 + 64) + 6144 * (512 + 64) + 512 * 64 * (192 + 256) + 64 * 256 * 6144
    )
    assert by_part["glm-5.2"]["attention"] == 78 * attention
    assert by_part["glm-5.2"]["routed experts"] == 75 * 256 * 3 * 6144 * 2048
    for name, parts in by_part.items():
        without_mtp = sum(count for part, count in parts.items() if part != "MTP")
        assert without_mtp == pytest.approx(744e9, rel=1e-3), name
    # Elements of the published files, with multi-token prediction.
    assert sum(by_part["glm-5.2"].values()) == pytest.approx(753e9, rel=1e-3)


def test_each_release_of_glm_shares_as_it_does():
    selecting = {name: list(glm(model=name).model.selecting) for name in configs.KNOWN if "glm" in name}
    every = list(range(1, 79))
    assert selecting == {"glm-5": every, "glm-5.1": every, "glm-5.2": SELECTING, "glm-5.3": SELECTING}
    assert len(SELECTING) == 21


def test_sizes_are_those_of_transformers():
    transformers = pytest.importorskip("transformers", minversion="5.23")
    for name, made in (
        ("glm-5", transformers.GlmMoeDsaConfig()),
        ("glm-5.2", transformers.GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3)),
        ("deepseek-v3.2", transformers.DeepseekV32Config()),
    ):
        theirs = made.to_dict()
        ours = configs.KNOWN[name]
        # A checkpoint's file has layers of multi-token prediction, which the classes lack.
        same = {key for key in ours if key in theirs}
        assert {"n_routed_experts", "index_n_heads", "v_head_dim", "vocab_size"} <= same
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}, name
        types = theirs.get("indexer_types", ["full"] * theirs["num_hidden_layers"])
        model = glm(model=name).model
        assert [each == "full" for each in types] == [kind.selects for kind in model.kinds], name
        assert [each == "sparse" for each in theirs["mlp_layer_types"]] == list(model.pattern), name


@pytest.mark.parametrize(
    ("changed", "selecting"),
    [
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [1, 3, 5]),
        ({"index_topk_freq": 2}, [1, 2, 4, 6]),  # transformers' default offset
        ({"indexer_types": ["full", "full", "shared", "shared", "full", "shared"]}, [1, 2, 5]),
        ({"index_topk_pattern": "FSFSSF", "index_topk_freq": 4}, [1, 3, 6]),
    ],
)
def test_a_file_says_which_layers_select(tmp_path, changed, selecting):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**configs.KNOWN["glm-5"], "num_hidden_layers": 6, **changed}))
    assert list(glm(model=str(file)).model.selecting) == selecting
    fewer = glm("--num-layers 4", str(file)).model
    assert list(fewer.selecting) == [layer for layer in selecting if layer < 5]
    said = glm("--dsa-indexer-topk-freq 3 --dsa-indexer-skip-topk-offset 1", str(file)).model
    assert list(said.selecting) == [1, 4], "the command line outranks the file"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "layer 0 shares"),
        ({"indexer_types": ["full", "half"]}, "indexer_types is no list of full or shared"),
        ({"index_topk_pattern": "SF" * 39}, "layer 0 shares"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types is no list of dense or sparse"),
    ],
)
def test_a_file_that_cannot_be_trained_is_refused(tmp_path, changed, problem):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**configs.KNOWN["glm-5"], **changed}))
    with pytest.raises(SettingsError, match=problem):
        glm(model=str(file))


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("--dsa-indexer-skip-topk-offset 79", "lies beyond the 78 layers.*give --num-layers 79"),
        ("--dsa-indexer-topk-freq 1 --dsa-indexer-topk-pattern CSS", "has 3 letters"),
        ("--pipeline-model-parallel-size 2", "begins with layer 40, which shares the selection of layer 39"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*39|t*39mL",
            "begins with layer 40",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*38|t*40L",
            "0 layers of multi-token prediction",
        ),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*38|t*41mL", "has 79 layers"),
        ("--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et*38|t*40mL", "no multiple of"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ex*38|t*40mL", "x is no kind"),
        (
            (
                "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*38|t*40mL "
                "--num-virtual-stages-per-pipeline-rank 2"
            ),
            "omit --num-virtual-stages-per-pipeline-rank",
        ),
    ],
)
def test_what_cannot_share_is_one_message(more, problem):
    with pytest.raises(SettingsError, match=problem) as caught:
        glm(more)
    assert "\n" not in str(caught.value)


def test_a_models_name_says_which_layers_share():
    job = "pretrain_dsa.py --dsa-model glm-5.2 --num-layers 8"
    sharing = arguments.job_of(job.split()).model.sharing
    assert [layer for layer in range(1, 9) if sharing.computes(layer)] == [1, 2, 3, 7]
    assert glm("--dsa-model glm-5.2", model="glm-5").model == glm().model
    with pytest.raises(SettingsError, match="begins with layer 5"):
        arguments.job_of([*job.split(), "--pipeline-model-parallel-size", "2"])
    with pytest.raises(SettingsError, match=r"contradicts --dsa-model glm-5, .*omit it, or omit --dsa-model"):
        glm("--dsa-model glm-5")


def test_the_nearest_layout_begins_its_chunks_with_computing_layers():
    with pytest.raises(SettingsError, match=r"works: PP2 .*--decoder-last-pipeline-num-layers 40"):
        glm("--pipeline-model-parallel-size 2")
    even = "--pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 6"
    with pytest.raises(SettingsError, match=r"VPP2 .*--pipeline-model-parallel-layout 'Et\*14\|") as caught:
        glm(even)
    layout = str(caught.value).split("layout '")[1].split("'")[0]
    said = f"--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout {layout}"
    assert glm(f"{said} --global-batch-size 6").layout.vpp == 2


# -- counts of plans -----------------------------------------------------------------------------


def test_weights_of_a_rank_are_those_of_its_computing_layers():
    job = glm(f"{SLIME} --expert-model-parallel-size 32")
    index = 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    starts = [1, *range(15, 64, 8)]
    for rank, (start, count) in enumerate(zip(starts, [14, *[8] * 6, 16], strict=True)):
        selecting = sum(start <= layer < start + count for layer in SELECTING)
        numbers = sizes.by_part(sizes.rank_weights(job)[rank], job.layout)
        assert numbers["indexer"] == selecting * index, rank


def test_a_layout_deals_out_what_its_letters_say():
    flags_of = glm(SLIME)
    layout = "Et*14|(t*8|)*6t*16mL"
    by_layout = glm(f"--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout {layout}")
    assert layouts.chunks(by_layout.layout, by_layout.model) == layouts.chunks(
        flags_of.layout, flags_of.model
    )
    assert memory.of_job(by_layout, 0.0) == memory.of_job(flags_of, 0.0)
    assert not any("NOT planned" in note for note in by_layout.notes)


def kept(job, rank: int = 1) -> float:
    return memory.of_job(job, 0.0)[rank].activations.get("indexer", 0.0)


def in_flight(job, rank: int = 1) -> int:
    (count,) = memory.of_job(job, 0.0)[rank].in_flight
    return count


@pytest.mark.parametrize("loss", ["", "--dsa-indexer-loss-coeff 0"])
def test_a_group_keeps_one_selection_and_one_indexers_activations(loss):
    """Rank 1 of the split has layers 15 to 22; 15 and 19 select."""
    job = glm(f"{SLIME} {loss}")
    layer = TOKENS * TOPK * 4  # int32
    if not loss:
        layer += TOKENS * TOPK * 4  # probabilities of the loss
        layer += TOKENS * (32 * 128 + 128 + 32) * 2  # queries, keys, weights
        layer += TOKENS * 2048 * 2 + TOKENS * (128 + 2) * 2 + 4 * TOKENS * 64 * 2  # inputs, norm, angles
    assert kept(job) == in_flight(job) * 2 * layer
    every = glm(f"{SLIME} {loss} --dsa-indexer-topk-freq 1")
    assert kept(every) == in_flight(every) * 8 * layer


def test_losses_of_layers_that_share_keep_scores_and_gradients():
    """``4 K (n - 1)`` bytes a token, indexer and its n layers: docs/features/dsa-shared-selections.md."""
    served = f"{SLIME} --dsa-indexer-loss-layers served"
    own, job = glm(SLIME), glm(served)
    assert kept(job) - kept(own) == in_flight(job) * 2 * 3 * TOKENS * TOPK * 4  # two indexers of four layers
    assert kept(glm(f"{served} {FULL}")) == 2 * kept(glm(f"{SLIME} {FULL}"))  # scores beside int32 indices
    assert kept(glm(f"{served} --dsa-indexer-loss-coeff 0")) == kept(
        glm(f"{SLIME} --dsa-indexer-loss-coeff 0")
    )


@pytest.mark.parametrize("recompute", [FULL, CORE])
def test_recomputed_groups_keep_their_selection_until_backward(recompute):
    job = glm(f"{SLIME} {recompute}")
    assert kept(job) == in_flight(job) * 2 * TOKENS * TOPK * 4
    assert kept(glm(f"{SLIME} {recompute} --dsa-indexer-topk-freq 1")) == 0
    # Layers 1 and 2 serve no other layer; of 1 to 14, layers 3, 7 and 11 do.
    assert kept(job, 0) == in_flight(job, 0) * 3 * TOKENS * TOPK * 4


def test_short_sequences_select_nothing_to_keep():
    assert kept(glm(f"{SLIME} {FULL} --seq-length 2048")) == 0


def test_index_keys_travel_to_computing_layers_alone():
    split = f"{SLIME} --context-parallel-size 2"
    job, every = glm(split), glm(f"{split} --dsa-indexer-topk-freq 1")

    def keys(planned) -> float:
        return next(
            transfer.nbytes
            for own in [communication.of_job(planned)[1]]
            for transfer in own
            if transfer.what == "keys" and transfer.when == "forward"
        )

    half = TOKENS // 2
    assert keys(job) + _rest(job) == half * 2 * (8 * 576 + 2 * 128) * job.microbatches
    assert keys(every) == half * 2 * 8 * (576 + 128) * every.microbatches


def _rest(job) -> float:
    key_bytes = [
        each.nbytes for each in communication.of_job(job)[1] if each.what == "keys" and each.when == "forward"
    ]
    return sum(key_bytes[1:])


def test_indexers_share_tensor_parallel_transfers_of_computing_layers():
    split = f"{SLIME} --tensor-model-parallel-size 2 --sequence-parallel"
    job, every = glm(split), glm(f"{split} --dsa-indexer-topk-freq 1")

    def gathered(planned) -> float:
        own = communication.of_job(planned)[1]
        return sum(each.nbytes for each in own if each.what in ("indexer's inputs", "indexer's target"))

    of_a_layer = TOKENS * (6144 + 2048) * 2 / 2 + 2 * TOKENS * TOPK * 4 / 2
    assert gathered(job) == 2 * of_a_layer * job.microbatches
    assert gathered(every) == 8 * of_a_layer * every.microbatches
    served = glm(f"{split} --dsa-indexer-loss-layers served")
    targets = 6 * 2 * TOKENS * TOPK * 4 / 2  # of six layers that share
    assert gathered(served) == gathered(job) + targets * job.microbatches


def test_work_of_indexers_is_that_of_computing_layers():
    shared, every = (work.model_flops(glm(more)) for more in ("", "--dsa-indexer-topk-freq 1"))
    visible = TOKENS * (TOKENS + 1) / 2
    selected_pairs = TOPK * TOKENS - TOPK * (TOPK - 1) / 2
    index = 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    forward = 2 * index * TOKENS + 2 * 32 * 128 * visible
    backward = 2 * index * TOKENS + 3 * 2 * 32 * 128 * selected_pairs + 2 * 64 * 576 * selected_pairs
    # The layer of multi-token prediction has its own indexer.
    assert shared["indexer"] == pytest.approx((21 + 1) * (forward + backward))
    assert every["indexer"] == pytest.approx((78 + 1) * (forward + backward))
    assert {part: flops for part, flops in shared.items() if part != "indexer"} == {
        part: flops for part, flops in every.items() if part != "indexer"
    }


def test_time_of_indexers_is_that_of_computing_layers():
    job, every = glm(SLIME), glm(f"{SLIME} --dsa-indexer-topk-freq 1")
    h200 = devices.device("h200")
    shared, alone = (timing.compute(each, h200, 1, 0)[0]["indexer"] for each in (job, every))
    assert shared == pytest.approx(alone * 2 / 8)


def test_layers_of_multi_token_prediction_share_where_they_are_told_to():
    separate, shared = (
        glm(f"--mtp-num-layers 3 {more}").model
        for more in ("--dsa-indexer-topk-freq 1", "--dsa-indexer-topk-freq 1 --dsa-indexer-share-for-mtp")
    )
    assert [kind.selects for kind in separate.mtp_kinds] == [True] * 3
    assert [(kind.selects, kind.serves) for kind in shared.mtp_kinds] == [
        (True, True),
        (False, False),
        (False, False),
    ]
    index = 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    own_mtp, shared_mtp = (sizes.by_part(sizes.model_weights(each))["MTP"] for each in (separate, shared))
    assert own_mtp - shared_mtp == 2 * index


def test_models_without_dsa_have_no_kind_that_selects():
    model = glm("--experimental-attention-variant none --dsa-indexer-topk-freq 1").model
    assert model.selecting == ()


# -- searches and commands ---------------------------------------------------------------------


def test_a_search_walks_splits_whose_chunks_begin_with_a_computing_layer():
    job = arguments.job_of(
        f"{GLM} --global-batch-size 1024 --seq-length 4096".split(), 1024, "glm-5.2", any_layout=True
    )
    walked = [
        candidate for candidate in search.candidates(job, devices.device("h200")) if candidate.layout.pp > 1
    ]
    assert {candidate.layout.pp for candidate in walked} == {2, 4, 8, 16}, (
        "21 computing layers begin 21 chunks at most"
    )
    assert any(candidate.layout.stages for candidate in walked)
    assert any(candidate.layout.vpp == 2 for candidate in walked)
    for layout in {candidate.layout for candidate in walked}:
        starts = {chunk[0] + 1 for own in layouts.chunks(layout, job.model) for chunk in own}
        assert starts <= set(SELECTING)


def test_a_search_says_what_it_leaves_out(capsys):
    words = ["plan", "--search", "--devices", "8", "--device", "cpu"]
    job = [
        "pretrain_dsa.py",
        "--num-layers",
        "4",
        "--global-batch-size",
        "16",
        "--dsa-indexer-topk-freq",
        "4",
    ]
    assert main([*words, "--", *job]) == 0
    printed = capsys.readouterr().out
    assert "1 of 4 layers (1) do: a pipeline has 1 chunk at most" in " ".join(printed.split())
    assert "PP" not in printed
    assert main([*words, "--device-memory", "1e-4", "--", *job]) == 2
    assert "a pipeline has 1 chunk at most" in capsys.readouterr().err


def test_a_plan_says_which_layers_select(capsys):
    words = ["plan", "--config", "glm-5.2", "--device", "h200", "--", *GLM.split(), *SLIME.split()]
    main([*words, "--expert-model-parallel-size", "32"])
    printed = capsys.readouterr().out
    assert "keys are selected in 21 of 78 layers (1-3, 7, 11, ..., 75)" in printed


def test_sharing_does_not_change_a_model_in_which_every_layer_selects():
    job = glm(SLIME, "glm-5")
    assert replace(job.model, sharing=Sharing(1, 5)).kinds == job.model.kinds


def test_flags_of_sharing_are_megatrons():
    options, _, unknown = flags.read(
        "pretrain_gpt.py --dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3".split()
    )
    assert unknown == []
    assert (options.dsa_indexer_topk_freq, options.dsa_indexer_skip_topk_offset) == (4, 3)
