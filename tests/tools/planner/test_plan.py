"""Plans: schedules, savings of features, searches and pictures."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule import lists, megatron_order
from mindspeed_dsa.tools.planner import (
    arguments,
    communication,
    differences,
    layouts,
    memory,
    plan,
    report,
    schedules,
    search,
    sizes,
)
from mindspeed_dsa.tools.planner.devices import device
from mindspeed_dsa.tools.planner.memory import GIB
from tests.tools.planner.jobs import DEEPSEEK, DENSE, EXAMPLE, deepseek, example, planned

V = "--schedules-method dualpipev --num-layers 16"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches"), [(1, 1, 3), (4, 1, 2), (4, 1, 8), (4, 2, 8), (2, 3, 6)]
)
@pytest.mark.parametrize("pairs", [False, True])
def test_orders_are_those_of_the_installed_megatron(ranks, chunks, microbatches, pairs):
    if pairs and chunks == 1:
        pytest.skip("Megatron pairs in interleaved pipelines")
    job = example()
    layout = replace(job.layout, pp=ranks, vpp=chunks, group=ranks)
    batch = replace(job.training, batch=microbatches * job.training.micro)
    job = replace(job, layout=layout, training=batch, features=replace(job.features, pairs=pairs))
    theirs = megatron_order.schedule(
        Megatron(), ranks, chunks, microbatches, paired=pairs, extra_warmup=pairs
    )
    assert schedules.schedule(job).ranks == theirs.ranks
    assert_peaks_are_those_of_the_list(job, theirs)


def assert_peaks_are_those_of_the_list(job, listed, smaller=True):
    """Check peaks of all events; a plan computes them from the first event only.

    Args:
        job: planned job.
        listed: job's schedule.
        smaller: whether operands take less than a forward keeps, as they do without recomputation.
    """
    kept, operands = [3.0, 2.0, 1.0], ([1.25, 0.5, 0.25] if smaller else [5.0, 4.0, 2.0])
    numbers = [3, 4, 1]
    for rank, events in enumerate(listed.ranks):
        later = {(event.chunk, event.microbatch) for event in events if event.kind.value == "W"}
        now = heaviest = 0.0
        for event in events:
            # A whole backward, in pairs of a V, computes its weight gradients and defers none.
            left = operands[event.chunk] if (event.chunk, event.microbatch) in later else 0.0
            before, now = (
                now,
                now + {"F": kept[event.chunk], "B": left - kept[event.chunk], "W": -left}[event.kind.value],
            )
            if event.pair is not None and event.kind.value == "F":
                start, shared = before, kept[event.chunk] / numbers[event.chunk]
                continue
            # The backward of a pair frees layers while the forward fills others: one layer is open twice.
            heaviest = max(heaviest, now if event.pair is None else max(start, now) + shared)
        assert schedules.peak(job, rank, kept, operands, numbers).nbytes == heaviest


@pytest.mark.parametrize("most", [None, 0, 1])
@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(4, 1, 2), (4, 1, 30), (4, 2, 16), (2, 3, 6)])
def test_weight_gradients_wait_as_the_list_has_them(ranks, chunks, microbatches, most):
    job = example("--transformer-impl local")
    layout = replace(job.layout, pp=ranks, vpp=chunks, group=ranks)
    batch = replace(job.training, batch=microbatches * job.training.micro)
    job = replace(
        job, layout=layout, training=batch, features=replace(job.features, split=True, waiting=most)
    )
    listed = lists.weights_later(megatron_order.schedule(Megatron(), ranks, chunks, microbatches), most)
    assert schedules.schedule(job).ranks == listed.ranks
    for smaller in (True, False):
        assert_peaks_are_those_of_the_list(job, listed, smaller)


@pytest.mark.parametrize(
    "detach", ["", "--dualpipev-dw-detach", "--moe-fb-overlap", "--moe-fb-overlap --dualpipev-dw-detach"]
)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 9), (8, 70)])
def test_dualpipevs_list_is_planned(ranks, microbatches, detach):
    layout = f"--pipeline-model-parallel-size {ranks} --global-batch-size {4 * microbatches}"
    job = example(f"{V} {layout} {detach}")
    listed = lists.dual_pipe_v(ranks, microbatches, "overlap" in detach, "detach" in detach)
    assert schedules.schedule(job).ranks == listed.ranks
    for smaller in (True, False):
        assert_peaks_are_those_of_the_list(job, listed, smaller)


def test_ranks_of_a_v_hold_both_ends_and_transfers_turn_on_the_last():
    """Each rank holds two layers at either end; a tied embedding has two copies; no message within a rank."""
    words = f"{V} --pipeline-model-parallel-size 2 --num-layers 8 --global-batch-size 32"
    job = example(f"{words} --no-untie-embeddings-and-output-weights")
    assert layouts.chunks(job.layout, job.model) == [[(0, 1), (6, 7)], [(2, 3), (4, 5)]]
    held = [sizes.by_part(item) for item in sizes.rank_weights(job)]
    assert held[0]["embedding"] == held[0]["output"] == job.model.vocabulary * job.model.hidden
    assert not {"embedding", "output"} & held[1].keys()
    assert not any(item.group == "embedding" for transfers in communication.of_job(job) for item in transfers)
    message = job.tokens * job.model.hidden * job.training.number
    for transfers in communication.of_job(job):
        received = sum(item.nbytes for item in transfers if item.group == "PP")
        assert received == 2 * job.microbatches * message
    first, last = memory.of_job(job, 0.0)
    assert first.temporary["logits"] > 0
    assert "logits" not in last.temporary


def test_waiting_gradients_fill_the_bubble_and_take_their_operands():
    local = "--pipeline-model-parallel-size 4 --num-layers 8 --global-batch-size 64"
    whole, bounded, split = (
        planned(example(f"{local} {more}"))
        for more in ("", "--split-backward --split-backward-waiting 0", "--split-backward")
    )
    waits = [plan_.time.parts["waiting in the pipeline"] for plan_ in (whole, bounded, split)]
    assert waits[0] > waits[1] > waits[2]
    assert [plan_.waiting for plan_ in split.ranks] == [(0,), (1,), (2,), (3,)]
    assert [plan_.waiting for plan_ in bounded.ranks] == [(0,)] * 4
    grown = [after.kept - before.kept for before, after in zip(whole.ranks, split.ranks, strict=True)]
    assert grown[0] == 0
    assert grown[3] == pytest.approx(split.ranks[3].activations["waiting weight gradients"])
    assert "weight gradients waiting" in report.text(split)
    assert "weight gradients waiting" not in report.text(whole)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{V} --pipeline-model-parallel-size 4 --num-layers 9", "'Et|t|t|t|t|t|t|t*2L'"),
        (V, "needs a pipeline"),
        (f"{V} --pipeline-model-parallel-size 4 --global-batch-size 16", "DualPipeV needs 8 microbatches"),
        (f"{V} --pipeline-model-parallel-size 2 --split-backward", "use --dualpipev-dw-detach"),
        ("--split-backward", "fills the waits of a pipeline"),
        ("--pipeline-model-parallel-size 2 --split-backward-waiting 1", "bounds what waits"),
        ("--pipeline-model-parallel-size 2 --dualpipev-dw-detach", "a schedule that is not chosen"),
        (
            "--pipeline-model-parallel-size 2 --split-backward --transformer-impl transformer_engine",
            "needs Megatron's own linear layers",
        ),
    ],
)
def test_schedules_are_refused_as_their_features_refuse_them(words, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        example(words)


def test_megatrons_flag_is_planned_as_what_serves_it():
    words = "--pipeline-model-parallel-size 2 --num-layers 8"
    ours, theirs = (example(f"{words} {flag}") for flag in ("--split-backward", "--delay-wgrad-compute"))
    assert ours == theirs
    assert ours.features.split


def test_a_search_of_dualpipev_finds_layouts_in_a_v():
    words = "--schedules-method dualpipev --num-layers 10 --global-batch-size 64 --seq-length 4096"
    job = example(words, 8, any_layout=True)
    candidates = [each.layout for each in search.candidates(job, device("cpu"))]
    assert {layout.v_shaped for layout in candidates} == {True}
    assert {layout.pp for layout in candidates} == {2, 4}
    assert {len(layout.stages) for layout in candidates} == {4, 8}  # ten layers divide into neither
    assert search.search(job, device("cpu"), best=1)[0].plan.job.layout.v_shaped


def test_sequences_that_ranks_do_not_divide_are_planned_with_their_padding():
    """Tokens per second count the data; memory and work are the padded job's."""
    layout = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length"
    odd, even = (planned(example(f"{layout} {length}", 4)) for length in (1021, 1024))
    assert odd.job.tokens == even.job.tokens == even.job.training.micro * 512
    assert odd.worst.total == even.worst.total
    assert odd.time.total == even.time.total
    assert odd.tokens_per_second == pytest.approx(even.tokens_per_second * 1021 / 1024)
    words = "sequences of 1021 tokens are padded to 1024 rows, which the ranks divide: 3 of them (0.29 %)"
    assert words in report.text(odd)
    assert "padded" not in report.text(even)


def test_every_layer_is_held_once_in_megatrons_order():
    job = example(
        "--num-layers 12 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3 "
        "--global-batch-size 16"
    )
    assert layouts.chunks(job.layout, job.model) == [[(0, 1), (4, 5), (8, 9)], [(2, 3), (6, 7), (10, 11)]]


@pytest.mark.parametrize(
    ("flag", "bytes_a_parameter"),
    [("--reuse-fp32-param", 2), ("--swap-optimizer", 12), ("--virtual-optimizer all", 8)],
)
def test_optimizer_features_take_their_bytes_away(flag, bytes_a_parameter):
    job = deepseek()
    layout = job.layout
    before, after = (memory.of_job(item, 0.0)[1] for item in (job, deepseek(flag)))
    weights = sizes.rank_weights(job)[1]
    share = sum(
        item.on_rank(layout) / (layout.expert_replicas if item.cut == "expert" else layout.replicas)
        for item in weights
    )
    assert before.state - after.state == pytest.approx(bytes_a_parameter * share)
    assert after.host == pytest.approx(0 if "reuse" in flag else bytes_a_parameter * share)


def test_a_flag_changes_what_it_is_about():
    before = planned(example())
    assert differences.words_of("--tensor-model-parallel-size 8") == ["--tensor-model-parallel-size", "8"]
    stock = differences.difference("--no-use-fused-dsa", before, planned(example("--no-use-fused-dsa")))
    assert stock.memory["activations: indexer"] > 5 * before.worst.activations["indexer"]
    assert stock.seconds["memory-bound operations"] > 0
    with pytest.raises(SettingsError, match="no flag that a plan depends on"):
        differences.words_of("--lr 1")


def test_a_search_leaves_out_ranks_that_cannot_share_a_copy_of_the_weights():
    sharded = "--no-use-distributed-optimizer --use-torch-fsdp2 --untie-embeddings-and-output-weights"
    job = example(f"{sharded} --fsdp2-sharding-size 4", 8, any_layout=True)
    found = search.search(job, device("cpu"), best=100)
    assert {each.plan.job.layout.replicas for each in found} == {4, 8}


def test_one_replica_gathers_nothing():
    sharded = "--no-use-distributed-optimizer --use-torch-fsdp2 --untie-embeddings-and-output-weights"
    before, after = (
        memory.of_job(example(f"{sharded} --pipeline-model-parallel-size 2", devices), 0.0)[0].temporary
        for devices in (2, 4)
    )
    assert "gathered layers" not in before
    assert "gathered layers" in after


def test_a_search_finds_the_fastest_that_fits():
    given = "--seq-length 8192 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3"
    job, small = example(given, 8, any_layout=True), device("cpu", memory=0.3, host_memory=64.0)
    results = search.search(job, small, best=3)
    assert [result.plan.fits for result in results] == [True, True, True]
    times = [result.plan.time.total for result in results]
    assert times == sorted(times)
    assert all(result.plan.job.layout.devices == 8 for result in results)
    roomy = search.search(job, device("cpu"), best=1)
    assert roomy[0].plan.time.total <= times[0]
    assert "limited by" in search.text(results, EXAMPLE.split())
    with pytest.raises(
        SettingsError, match="no layout of 7 cpu divides model, batch and sequence; use another"
    ):
        search.search(example(given, 7, any_layout=True), small)
    too_large = r"the closest, .*, needs [\d.]+ GiB"
    with pytest.raises(SettingsError, match=rf"{too_large}\. Use more"):
        search.search(job, device("cpu", memory=0.02, host_memory=64.0))
    with pytest.raises(SettingsError, match=rf"{too_large} and .* of a node's host, with 0\.001 assumed\."):
        search.search(job, device("cpu", memory=0.02, host_memory=0.001))


@pytest.mark.parametrize(
    ("without", "kept"),
    [
        # Two masks of a byte per layer, and one for the embedding.
        ("--hidden-dropout 0", (2 * 4 + 1) * 2 * 4096 * 1024),
        # Transformer Engine's attention is a flash kernel, so its dropout keeps nothing.
        ("--attention-dropout 0", 0),
        # Probabilities before and after the dropout, and the mask: modules without dropout lack the latter
        # two.
        ("--transformer-impl local --attention-dropout 0", 4 * (2 + 1) * 2 * 16 * 4096**2),
    ],
)
def test_dropouts_keep_their_masks(without, kept):
    base = [word for word in without.split() if word in ("--transformer-impl", "local")]
    before, after = (
        memory.of_job(arguments.job_of([*DENSE.split(), *words]), 0.0)[0].kept
        for words in (base, without.split())
    )
    assert before - after == kept


@pytest.mark.parametrize(("sharding", "shards"), [("", 32), ("--fsdp2-sharding-size 8", 8)])
def test_shards_divide_what_is_dense_and_travel_with_every_microbatch(sharding, shards):
    whole, job = (
        deepseek(f"--no-use-distributed-optimizer {more}") for more in ("", f"--use-torch-fsdp2 {sharding}")
    )
    weights = sizes.rank_weights(job)[1]
    dense = sum(item.on_rank(job.layout) for item in weights if item.cut != "expert")
    before, after = (memory.of_job(item, 0.0)[1] for item in (whole, job))
    # Weights of two bytes; gradients, master weights and two moments of four.
    assert before.state - after.state == pytest.approx(18 * dense * (1 - 1 / shards))
    assert after.temporary["gathered layers"] > 0
    received = communication.of_job(job)[1]
    by_collective = {
        (item.group, item.collective): item.nbytes for item in received if item.group in ("DP", "FSDP")
    }
    group = "DP" if shards == 32 else "FSDP"
    gathers = sum(item.nbytes for item in received if item.group == group and item.what == "weights")
    share = (shards - 1) / shards
    assert gathers == pytest.approx(job.microbatches * 2 * 2 * dense * share)
    assert by_collective[group, "reduce-scatter"] == pytest.approx(job.microbatches * 4 * dense * share)
    copies = 32 // shards
    summed = job.microbatches * 2 * 4 * dense / shards * (copies - 1) / copies
    assert by_collective.get(("DP", "all-reduce"), 0.0) == pytest.approx(summed)
    late = planned(replace(job, sharding=replace(job.sharding, prefetch=0)))
    assert late.time.total > planned(job).time.total


@pytest.mark.parametrize(("optimizer", "size"), [("", 6), ("--no-use-distributed-optimizer", 18)])
def test_context_parallel_ranks_divide_the_vocabulary(optimizer, size):
    """Two bytes of a weight and four of its gradient; a distributed optimizer's 12 are divided already."""
    loss = f"--context-parallel-size 8 --fused-linear-cross-entropy {optimizer}"
    whole, job = (deepseek(f"{loss} {more}") for more in ("", "--cp-shard-vocabulary"))
    assert job.model.mtp == 1
    weight = job.model.vocabulary * job.model.hidden
    rows = job.microbatches * 7 * job.tokens * job.model.hidden * 2
    # Embedding; layers alone; output layer, and the copy of the embedding for multi-token prediction.
    for rank, weights, lookups, losses in ((0, 1, 1, 0), (1, 0, 0, 0), (15, 2, 1, 2)):
        before, after = (memory.of_job(each, 0.0)[rank] for each in (whole, job))
        assert before.state - after.state == pytest.approx(size * weights * weight * 7 / 8)
        sums = {
            item.what: sum(same.nbytes for same in communication.of_job(job)[rank] if same.what == item.what)
            for item in communication.of_job(job)[rank]
            if item.group == "CP"
        }
        for what in ("embeddings", "gradients of embeddings"):
            assert sums.get(what, 0.0) == pytest.approx(lookups * rows)
        for what in ("hidden states", "gradients of hidden states"):
            assert sums.get(what, 0.0) == pytest.approx(losses * rows)
        kept, temporary = after.kept - before.kept, after.temporary
        assert (kept > 0) == (losses > 0) or rank == 0  # hidden states of all tokens
        assert ("rows of all context parallel ranks" in temporary) == (weights > 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--fused-linear-cross-entropy", "among context parallel ranks, and there is one"),
        ("--context-parallel-size 2", "needs --fused-linear-cross-entropy"),
        (
            (
                "--context-parallel-size 2 --fused-linear-cross-entropy --make-vocab-size-divisible-by 1 "
                "--vocab-size 257"
            ),
            "give --make-vocab-size-divisible-by a multiple of 2",
        ),
    ],
)
def test_a_vocabulary_that_cannot_be_divided_is_refused(words, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        example(f"--cp-shard-vocabulary {words}")


@pytest.mark.parametrize("cp", [1, 8])
def test_the_vocabulary_is_divided_where_an_end_does_not_fit(cp):
    words = [*DENSE.split(), *"--vocab-size 256000 --pipeline-model-parallel-size 4".split()]
    words += f"--untie-embeddings-and-output-weights --context-parallel-size {cp}".split()
    small = device("cpu", memory=4.0)

    def made(more=()):
        return plan.make(arguments.job_of([*words, *more]), small, quick=True)

    before = made()
    assert before.verdict == plan.TOO_LARGE
    assert before.worst.rank in (0, 3)
    flag = "--cp-shard-vocabulary --fused-linear-cross-entropy"
    found = [way for way in differences.ways(before, made) if way.flags == flag]
    assert bool(found) == (cp > 1)
    # 7/8 of the 18 bytes of 256,000 x 1024 weights, 3.8 GiB, and the logits.
    assert all(way.memory < -3.7 * GIB for way in found)


@pytest.mark.parametrize(("sharding", "shards"), [("", 8), ("--fsdp2-sharding-size 16", 4)])
def test_experts_are_divided_among_the_ranks_that_have_the_same_ones(sharding, shards):
    """PP16, EP4 and 32 ranks of data and context parallelism: every fourth rank has the same experts."""
    flags = f"--no-use-distributed-optimizer --use-torch-fsdp2 --expert-model-parallel-size 4 {sharding}"
    whole, job = (deepseek(f"{flags} {more}") for more in ("", "--fsdp2-shard-experts"))
    experts = sum(item.on_rank(job.layout) for item in sizes.rank_weights(job)[1] if item.cut == "expert")
    before, after = (memory.of_job(item, 0.0)[1] for item in (whole, job))
    assert before.state - after.state == pytest.approx(18 * experts * (1 - 1 / shards))
    assert after.temporary["gathered layers"] > before.temporary["gathered layers"]
    received = communication.of_job(job)[1]
    by_collective = {
        (item.collective, item.when): item.nbytes for item in received if item.group in ("EDP", "EFSDP")
    }
    share = (shards - 1) / shards
    for when in ("forward", "backward"):
        assert by_collective["all-gather", when] == pytest.approx(job.microbatches * 2 * experts * share)
    assert by_collective["reduce-scatter", "backward"] == pytest.approx(
        job.microbatches * 4 * experts * share
    )
    summed = job.microbatches * 2 * 4 * experts / shards * (8 // shards - 1) / (8 // shards)
    assert by_collective.get(("all-reduce", "backward"), 0.0) == pytest.approx(summed)
    assert ("all-reduce", "end") not in by_collective or by_collective["all-reduce", "end"] == 0
    assert planned(job).time.total > planned(whole).time.total


def test_with_experts_sharded_less_is_held_than_with_the_distributed_optimizer():
    before = planned(deepseek("--expert-model-parallel-size 4"))
    sharded = "--no-use-distributed-optimizer --use-torch-fsdp2 --expert-model-parallel-size 4"
    assert planned(deepseek(sharded)).worst.total > before.worst.total
    assert planned(deepseek(f"{sharded} --fsdp2-shard-experts")).worst.total < before.worst.total


def test_only_what_computation_hides_is_swapped_with_auto():
    words = {"off": "", "all": "--swap-attention", "auto": "--swap-attention auto"}
    roomy = device("h200", memory=1000)
    plans = {name: plan.make(deepseek(more), roomy) for name, more in words.items()}
    worst = {name: max(rank.total for rank in each.ranks) for name, each in plans.items()}
    on_host = {name: max(rank.host for rank in each.ranks) for name, each in plans.items()}
    assert "swapped attention" in plans["all"].time.parts
    assert "swapped attention" not in plans["auto"].time.parts
    assert plans["auto"].time.total < plans["all"].time.total
    assert worst["all"] < worst["auto"] < worst["off"]
    assert on_host["off"] == 0 < on_host["auto"] < on_host["all"]
    small = plan.make(deepseek(words["auto"]), device("h200", memory=worst["auto"] / GIB / 1.001))
    assert max(rank.total for rank in small.ranks) < worst["auto"]
    largest = max(plans["auto"].ranks, key=lambda rank: rank.total).rank
    assert small.ranks[largest].host == pytest.approx(plans["all"].ranks[largest].host)
    bounded = plan.make(deepseek("--swap-attention auto --swap-attention-bytes 1000000000"), roomy)
    assert max(rank.host for rank in bounded.ranks) == pytest.approx(1e9)


@pytest.mark.parametrize("move", ["--swap-optimizer", "--virtual-optimizer all"])
def test_swapped_attention_does_not_slow_the_optimizer_down(move):
    alone, both = planned(deepseek(move)), planned(deepseek(f"{move} --swap-attention"))
    assert both.worst.host > alone.worst.host
    assert both.time.parts["optimizer"] == alone.time.parts["optimizer"]


def test_the_optimizer_updates_all_parameters_wherever_moments_are():
    cards = device("h200", host=1e6)
    plans = [plan.make(deepseek(more), cards) for more in ("", "--swap-optimizer", "--virtual-optimizer 1")]
    times = [each.time.parts["optimizer"] for each in plans]
    assert times == pytest.approx([times[0]] * 3)


@pytest.mark.parametrize(("implementation", "width"), [("transformer_engine", 128 * 320), ("local", 576)])
def test_a_ring_moves_heads_in_transformer_engine_and_latents_in_ours(implementation, width):
    words = "--experimental-attention-variant none --context-parallel-size 2 --transformer-impl"
    job = deepseek(f"{words} {implementation}")
    sent = [each for each in communication.of_job(job)[1] if each.group == "CP" and each.what == "keys"]
    assert sent[0].nbytes == job.microbatches * 4 * 2048 * width * 2


def test_imbalance_grows_experts_work_and_traffic():
    even, skewed = (planned(replace(deepseek(), imbalance=skew)) for skew in (1.0, 1.5))
    for part in ("permutation", "EP transfers"):
        assert skewed.time.parts[part] == pytest.approx(1.5 * even.time.parts[part])
    # Weights and their gradients are moved as often.
    assert 1.2 < skewed.time.parts["routed experts"] / even.time.parts["routed experts"] < 1.5


def test_utilisation_is_model_flops_over_the_devices():
    plan = planned(deepseek())
    per_token = sum(plan.flops.values()) / 4096
    assert per_token == pytest.approx(277e9, rel=0.01)
    assert plan.utilisation(1e6) == pytest.approx(per_token * 1e6 / (512 * 989e12))


def test_the_command_prints_writes_and_draws(tmp_path, capsys):
    files = {"--json": tmp_path / "plan.json", "--png": tmp_path / "plan.png"}
    words = ["plan", "--devices", "512", "--device", "h200", "--config", "deepseek-v3.2"]
    words += [f"{flag}={file}" for flag, file in files.items()]
    status = main([*words, "--what-if=--swap-optimizer", "--", *DEEPSEEK.split(), *FULL.split()])
    printed = capsys.readouterr().out
    assert status == 0, printed
    record = json.loads(files["--json"].read_text())
    assert record["fits"]
    assert f"{record['memory'][0]['total'] / GIB:.2f}" in printed
    assert record["what_if"][0]["memory"]["moments"] < 0
    assert files["--png"].read_bytes()[:4] == b"\x89PNG"
    assert main(["plan", "--device-memory", "1e-3", "--", "pretrain_dsa.py"]) == 1
    assert "does NOT fit" in capsys.readouterr().out
    assert main(["plan", "--device", "abacus", "--", "pretrain_dsa.py"]) == 2
    capsys.readouterr()
    assert main(["plan", "--what-if=--tensor-model-parallel-size 3", "--", "pretrain_dsa.py"]) == 2
    assert capsys.readouterr().out == "", "a refusal is one message"
    assert main(["plan", "--devcies", "8", "--", "pretrain_dsa.py"]) == 2
    assert main(["plan", "--search", "--best", "0", "--", "pretrain_dsa.py"]) == 2
    assert main(["plan", "--json", str(tmp_path / "nowhere" / "plan.json"), "--", "pretrain_dsa.py"]) == 2
