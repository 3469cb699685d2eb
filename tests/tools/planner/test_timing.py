"""Formulas of the step time: moved bytes, host time, recomputation, pairs, and the optimizer's dtypes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from mindspeed_dsa.tools.planner import (
    arguments,
    communication,
    memory,
    report,
    schedules,
    search,
    timing,
    work,
)
from mindspeed_dsa.tools.planner.devices import CONSTANTS, device
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.routing import BIASED, FEW, FORCED, IMBALANCES, LOSS
from tests.tools.planner.jobs import DENSE, deepseek, planned

QWEN = (
    "pretrain_gpt.py --seq-length 4096 --micro-batch-size 1 --bf16 --global-batch-size 64 "
    "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --moe-router-force-load-balancing"
)
H200 = device("h200")


def qwen(more="", devices=8):
    return arguments.job_of([*QWEN.split(), *more.split()], devices, "qwen3-30b-a3b")


def dense(more=""):
    return arguments.job_of([*DENSE.split(), *more.split()])


def item(job, part, kind=None):
    found = work.layer(job, kind or job.model.kinds[-1])
    return next(each for each in found if each.part == part)


def test_products_move_rows_weights_and_main_gradients():
    """768 wide experts: 16 on each of 8 ranks, with 4096 x 8 tokens; main gradients are fp32."""
    experts = item(qwen(), "routed experts")
    rows, hidden, width = 4096 * 8, 2048, 768
    weights = 16 * 3 * hidden * width
    moved_rows = rows * (hidden + 2 * width + width + hidden)
    assert experts.forward == 2 * rows * 3 * hidden * width
    assert experts.moved == 2 * (weights + moved_rows)
    # The input's gradient as the forward; then both rows again, and the gradient read and written.
    assert experts.moved_weights == 2 * moved_rows + 2 * 4 * weights
    assert experts.moved_back == experts.moved + experts.moved_weights
    half = item(qwen("--grad-reduce-in-bf16"), "routed experts")
    assert experts.moved_back - half.moved_back == 2 * 2 * weights


def test_time_of_a_product_is_that_of_flops_and_of_bytes():
    experts = item(qwen(), "routed experts")
    computing = experts.forward / (H200.tflops * 1e12 * H200.matmul)
    moving = experts.moved / (H200.hbm * 1e9 * H200.moving)
    assert timing.spent(H200, experts, experts.forward, experts.moved) == pytest.approx(computing + moving)


def test_projections_have_the_work_of_their_parameters():
    for job in (qwen(), deepseek()):
        kind = job.model.kinds[-1]
        found = [each for each in work.layer(job, kind) if each.part == "projections"]
        model = job.model
        if model.latent:
            numbers = model.hidden * (model.query_lora + model.kv_lora + model.rope)
            numbers += model.heads * (model.query_lora * model.query_dim + model.value * model.hidden)
            numbers += model.heads * model.kv_lora * (model.nope + model.value)
        else:
            numbers = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
        assert sum(each.forward for each in found) == 2 * numbers * job.tokens


def test_permutation_and_loss_move_bytes():
    job = qwen()
    permuted = item(job, "permutation")
    assert permuted.moved + permuted.moved_back == 9 * 4096 * 8 * 2048 * 2
    loss = next(each for each in work.end(job) if each.part == "loss")
    assert loss.moved + loss.moved_back == 12 * 4096 * job.model.vocabulary


def test_a_stage_takes_the_longer_of_device_and_host():
    """One microbatch of 48 layers: 9 ms a layer for the host, which the device needs less than."""
    job = qwen("--global-batch-size 8")
    made = planned(job)
    host, gaps = timing.launched(job, H200, 0, 0)
    assert host == pytest.approx(48 * 9e-3)
    assert gaps == pytest.approx(48 * 0.6e-3)
    ends = made.time.parts["optimizer"] + sum(
        value for name, value in made.time.parts.items() if name in ("DP transfers", "EDP transfers")
    )
    assert made.time.total == pytest.approx(host + ends)
    assert made.time.parts["launches by the host"] > 0
    graphs = qwen("--global-batch-size 8 --cuda-graph-impl transformer_engine")
    assert timing.launched(graphs, H200, 0, 0)[0] == pytest.approx(0.65 * host)
    assert planned(graphs).time.total < made.time.total
    # Larger microbatches keep the device busy.
    assert "launches by the host" not in planned(qwen("--micro-batch-size 8")).time.parts
    assert timing.launched(dense(), H200, 0, 0) == (4 * 2e-3, 0)
    assert timing.launched(dense(), device("cpu"), 0, 0) == (0, 0)
    whole = qwen("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert timing.launched(whole, H200, 0, 0)[0] == pytest.approx(1.4 * host)


@pytest.mark.parametrize(
    ("more", "balancing"),
    [
        ("--moe-router-force-load-balancing", FORCED),
        ("--moe-router-enable-expert-bias", BIASED),
        ("--num-experts 8", FEW),
        ("", LOSS),
    ],
)
def test_imbalance_is_that_of_the_balancing(more, balancing, capsys):
    words = [*QWEN.replace("--moe-router-force-load-balancing", "").split(), *more.split()]
    job = arguments.job_of(words, 8, "qwen3-30b-a3b")
    assert job.balancing == balancing
    assert job.skew == IMBALANCES[balancing]
    given = arguments.job_of(words, 8, "qwen3-30b-a3b", imbalance=1.3)
    assert (given.skew, given.balancing) == (1.3, "")
    # One rank with all experts has all tokens.
    assert replace(job, layout=replace(job.layout, ep=1)).skew == 1.0


def seconds_again(job, rank=0):
    return timing.recomputation(job, H200, rank, 0)


def test_selective_recomputation_repeats_the_named_parts():
    """DeepSeek-V3.2's dense layers are the first three: ``mlp`` repeats nothing elsewhere."""
    selective = "--recompute-granularity selective --recompute-modules"
    modules = {name: deepseek(f"{selective} {name}") for name in ("mlp", "moe", "mla_up_proj", "core_attn")}
    assert seconds_again(modules["mlp"], rank=1) == 0
    assert seconds_again(modules["mlp"], rank=0) > 0
    parts = {
        "moe": ("router", "routed experts", "permutation", "shared experts"),
        "core_attn": ("attention", "indexer"),
    }
    for name, own in parts.items():
        job = modules[name]
        forward = timing.compute(job, H200, 1, 0)[0]
        assert seconds_again(job, 1) == pytest.approx(sum(forward[part] for part in own))
    up = seconds_again(modules["mla_up_proj"], 1)
    assert 0 < up < timing.compute(modules["mla_up_proj"], H200, 1, 0)[0]["projections"]
    whole = deepseek("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert seconds_again(whole, 1) == pytest.approx(sum(timing.compute(whole, H200, 1, 0)[0].values()))


def test_recomputed_experts_send_their_tokens_again():
    selective = "--recompute-granularity selective --recompute-modules"

    def received(job):
        return communication.by_group(communication.of_job(job)[1]).get("EP", 0.0)

    before, again = (received(deepseek(more)) for more in ("", f"{selective} moe"))
    assert again == pytest.approx(1.5 * before)
    assert received(deepseek(f"{selective} moe_act")) == before
    written, act, moe = (
        memory.of_job(deepseek(f"{selective} {name}"), 0.0)[1].repeated for name in ("mlp", "moe_act", "moe")
    )
    assert written == 0 < act < moe


def test_pairs_without_a_pipeline_hold_one_microbatch_and_one_layer():
    alone, pairs = (
        qwen("--global-batch-size 512"),
        qwen("--global-batch-size 512 --overlap-moe-expert-parallel-comm"),
    )
    before, after = (memory.of_job(job, 0.0)[0] for job in (alone, pairs))
    assert after.in_flight == (1,)
    assert after.kept - before.kept == pytest.approx(after.activations["layer of both passes"])
    assert schedules.peak(pairs, 0, [48.0], [0.0], [48]).nbytes == 49.0
    assert schedules.peak(alone, 0, [48.0], [0.0], [48]).nbytes == 48.0


def test_pairs_hide_half_of_the_experts_transfers():
    alone, pairs = (planned(qwen(more)).time for more in ("", "--overlap-moe-expert-parallel-comm"))
    assert pairs.parts["EP transfers"] == pytest.approx(0.5 * alone.parts["EP transfers"])
    assert pairs.hidden["EP"] == pytest.approx(pairs.parts["EP transfers"])


def test_dtypes_of_the_precision_aware_optimizer_take_their_bytes():
    aware = "--use-distributed-optimizer --use-precision-aware-optimizer"
    plain, half = (qwen(f"{aware} {more}") for more in ("", "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"))
    before, after = (memory.of_job(job, 0.0)[0] for job in (plain, half))
    assert before.moments - after.moments == 4 * after.updated
    assert before.state - after.state == 4 * after.updated
    both = memory.of_job(qwen(f"{aware} --main-grads-dtype bf16 --main-params-dtype fp16"), 0.0)[0]
    assert both.masters == 2 * both.updated
    assert both.gradients == before.gradients / 2
    times = [planned(job).time.parts["optimizer"] for job in (plain, half)]
    assert times[1] == pytest.approx(times[0] * (32 - 8) / 32)


def test_a_person_reads_a_range_and_two_digits():
    made = planned(qwen())
    low, high = made.seconds_range
    assert (low * 1.25, high / 1.25) == pytest.approx((made.time.total, made.time.total))
    text = report.text(made)
    assert f"estimate: {report.duration(low)} to {report.duration(high)} s a step" in text
    assert f"{made.worst.allocated / GIB:.1f} GiB allocated" in text
    assert [report.digits(value) for value in (211_634, 99.6, 3.14159)] == ["210,000", "100", "3.1"]
    assert [report.duration(value) for value in (247.4, 24.74)] == ["247", "25"]
    # With one microbatch, fixed times may double a step.
    single = planned(qwen("--global-batch-size 8"))
    assert single.seconds_range[1] == pytest.approx(2 * single.time.total)


def test_a_plan_prints_its_constants_with_their_sources():
    constants = planned(qwen()).record()["constants"]
    assert constants["host_experts"]["value"] == 9.0
    assert all(each["meaning"] and each["source"] for each in constants.values())
    # Every number of a device that is no figure of its data sheet is explained.
    stated = {
        "memory",
        "tflops",
        "hbm",
        "node",
        "link",
        "network",
        "host",
        "host_memory",
        "host_devices",
        "reserve",
    }
    assert {field.name for field in fields(H200)} == {"name", *stated, *CONSTANTS}


@pytest.mark.full
def test_a_search_says_which_layouts_are_too_near_to_tell():
    found = search.search(arguments.job_of(QWEN.split(), 8, "qwen3-30b-a3b", any_layout=True), H200, best=2)
    quick, slow = (
        replace(found[0].plan, time=replace(found[0].plan.time, total=each)) for each in (1.0, 1.3)
    )
    said = "the step times of the first 2 rows differ by less than a factor of 1.25"
    texts = [
        " ".join(search.text([search.Found(plan_, "") for plan_ in (quick, other)], []).split())
        for other in (replace(quick, time=replace(quick.time, total=1.2)), slow)
    ]
    assert said in texts[0]
    assert said not in texts[1]


def test_fp8_shortens_a_step_by_its_factor():
    bf16, fp8 = planned(qwen()), planned(qwen("--fp8-format hybrid"))
    assert fp8.time.total == pytest.approx(bf16.time.total / 1.15)
    assert sum(fp8.time.parts.values()) == pytest.approx(fp8.time.total)
    assert any("fp8" in note for note in fp8.job.notes)


def test_bytes_of_weights_in_fp8():
    """A number takes a byte by rows and one by columns, beside bf16 or in its place."""

    def gathered(job):
        transfers = communication.of_job(job)[0]
        return sum(
            each.nbytes for each in transfers if (each.collective, each.what) == ("all-gather", "weights")
        )

    zero = "--use-distributed-optimizer"
    jobs = [
        qwen(f"{zero} {more}")
        for more in (
            "",
            "--fp8-format hybrid --fp8-recipe blockwise",
            "--fp8-format hybrid --fp8-recipe blockwise --fp8-param-gather",
            "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather",
        )
    ]
    bf16, copied, stored, microscaled = (planned(job).worst for job in jobs)
    matrices = bf16.numbers["attention"] + bf16.numbers["routed experts"]
    assert copied.weights == bf16.weights + 2 * matrices
    assert stored.weights == microscaled.weights == bf16.weights
    assert copied.masters == stored.masters == bf16.masters > 0
    assert gathered(jobs[1]) == gathered(jobs[3]) == gathered(jobs[0])
    # Each of eight ranks has its own experts, and of the gathered weights only attention's are in fp8.
    dense = sum(bf16.numbers.values()) - bf16.numbers["routed experts"]
    saved = bf16.numbers["attention"] / (2 * dense)
    assert gathered(jobs[2]) == pytest.approx((1 - saved) * gathered(jobs[0]))
    local = planned(qwen("--fp8-format hybrid --transformer-impl local")).worst
    assert local.weights == planned(qwen("--transformer-impl local")).worst.weights
