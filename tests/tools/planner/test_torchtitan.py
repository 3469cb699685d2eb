"""Plans of TorchTitan's TOML files: layouts, bytes by hand, settings that are refused."""

from __future__ import annotations

import json

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner import communication, memory, plan, torchtitan
from mindspeed_dsa.tools.planner.devices import device

JOB = """
[model]
name = "deepseek_v3"
flavor = "671B"
converters = ["npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm", "npu_rope"]
[optimizer]
npu_swap_optimizer = true
[training]
local_batch_size = 16
seq_len = 32768
[parallelism]
fsdp_reshard_after_forward = "always"
tensor_parallel_degree = 4
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
expert_parallel_degree = 64
context_parallel_degree = 16
[activation_checkpoint]
mode = "full"
"""
EXPERT = 3 * 7168 * 2048
DENSE = "--model.name llama3 --model.flavor 8B --model.converters= --parallelism.expert_parallel_degree 1"
ALONE = "--parallelism.pipeline_parallel_degree 1 --parallelism.context_parallel_degree 1"


@pytest.fixture
def job(tmp_path):
    """Return a function from more words of the command line to the job."""
    file = tmp_path / "job.toml"
    file.write_text(JOB)

    def build(words: str = "", devices: int | None = 128, config: str | None = None):
        return torchtitan.job_of([str(file), *words.split()], devices, config, None)

    return build


def ranks(of):
    return memory.of_job(of, 0.05)


def test_the_layout_and_the_step(job):
    planned = job()
    assert str(planned.layout) == "TP4 PP2 VPP2 EP64 CP16"
    # 61 layers, of which embedding and output count as one each.
    assert [stage.count("t") for stage in planned.layout.stages] == [15, 16, 16, 14]
    assert (planned.training.batch, planned.microbatches, planned.shards, planned.expert_shards) == (
        16,
        16,
        16,
        1,
    )
    assert planned.features.attention
    assert planned.features.permute_fusion
    assert not planned.model.mtp


def test_bytes_of_a_rank_by_hand(job):
    """28 and 30 layers with experts, 4 experts of each on a rank; weights, gradients and moments in fp32."""
    for rank, layers in zip(ranks(job("--model.name deepseek_v32")), (28, 30), strict=True):
        experts = layers * 256 // 64 * EXPERT
        dense = sum(rank.numbers.values()) - experts
        assert rank.weights == rank.gradients == pytest.approx(4 * (experts + dense / 16))
        assert rank.host == pytest.approx(8 * (experts + dense / 16))
        assert rank.moments == rank.masters == 0


def test_gradients_stay_whole_in_pipelines_of_torch(job):
    ours, reduced = job(), job("--model.name deepseek_v32")
    for whole, part in zip(ranks(ours), ranks(reduced), strict=True):
        assert whole.gradients == pytest.approx(4 * sum(whole.numbers.values()))
        assert whole.gradients > part.gradients
        # bf16 copies of all weights, instead of those of two layers.
        gathered = whole.temporary["gathered layers"]
        assert gathered == pytest.approx(2 * sum(whole.numbers.values()))
        assert gathered > part.temporary["gathered layers"]
    sums = [communication.by_group(communication.of_job(each)[0])["DP"] for each in (reduced, ours)]
    assert sums[0] > 3 * sums[1], (
        "weights are gathered once, not twice, and gradients are sent once in a step"
    )


def test_one_data_parallel_rank_keeps_no_copies_of_layers_without_a_pipeline(job):
    with_cp, alone = (
        ranks(job(f"{DENSE} --parallelism.pipeline_parallel_degree 1 {more}", 4 * size))
        for more, size in (
            ("--parallelism.context_parallel_degree 4", 4),
            ("--parallelism.context_parallel_degree 1", 1),
        )
    )
    assert "gathered layers" in with_cp[0].temporary
    # One rank of FSDP and tensor parallelism: TorchTitan does not cast, so that all is fp32.
    assert "gathered layers" not in alone[0].temporary
    assert alone[0].weights == pytest.approx(4 * with_cp[0].weights)


@pytest.mark.parametrize(("policy", "stays"), [("always", False), ("default", False), ("never", True)])
def test_weights_that_stay_gathered_without_a_pipeline(job, policy, stays):
    (rank,) = ranks(job(f"{DENSE} {ALONE} --parallelism.fsdp_reshard_after_forward {policy}"))
    numbers = sum(rank.numbers.values())
    assert (rank.temporary["gathered layers"] == pytest.approx(2 * numbers)) == stays


def test_copies_of_shards(job):
    planned = job(f"{DENSE} {ALONE} --parallelism.data_parallel_replicate_degree 8")
    assert (planned.layout.dp, planned.shards) == (32, 4)


def test_weights_in_bf16(job):
    (half,), (full,) = (
        ranks(job(f"{DENSE} {ALONE} --optimizer.no_npu_swap_optimizer --training.dtype {dtype}"))
        for dtype in ("bfloat16", "float32")
    )
    for name in ("weights", "gradients", "moments"):
        assert getattr(half, name) == pytest.approx(getattr(full, name) / 2)
    assert half.moments == pytest.approx(2 * half.weights)


def test_recomputation_and_converters_change_what_is_kept(job):
    def kept(words: str) -> float:
        return ranks(job(words))[0].kept

    modes = [f"--activation_checkpoint.mode {mode}" for mode in ("full", "selective", "none")]
    assert kept(modes[0]) < kept(modes[1]) < kept(modes[2])
    named = f"{modes[2]} --model.converters npu_dsa,npu_rms_norm"
    assert kept(named) > kept(f"{named},npu_permute")
    assert kept(named) < kept(f"{modes[2]} --model.converters npu_dsa")


def test_a_schedule_of_one_chunk_and_one_in_a_v(job):
    assert job("--parallelism.pipeline_parallel_schedule 1F1B").layout.vpp == 1
    folded = job("--parallelism.pipeline_parallel_schedule DualPipeV")
    assert folded.layout.v_shaped
    assert folded.features.pairs


def test_sizes_of_a_configuration(job):
    assert job(config="glm-5").model.hidden == 6144


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--parallelism.tensor_paralel_degree 2",
            "has no setting 'tensor_paralel_degree'.* tensor_parallel_degree",
        ),
        ("--trainning.seq_len 4096", r"no section \[trainning\]; did you mean training"),
        ("--training.seq_len many", "--training.seq_len many is no value of it"),
        ("--training.seq_len 0", r"\[training\] seq_len = 0: give 1 or more"),
        ("--num-layers 3", "--num-layers: settings behind .*job.toml are TorchTitan's"),
        ("many", "'many' behind .*job.toml is no setting"),
        ("--activation_checkpoint.mode memory_budget", "give none, selective or full"),
        ("--model.converters npu_dsa,float8", "plans know no float8, but npu_dsa, "),
        ("--model.flavor 16B", "flavor = '16B': the sizes of this deepseek_v3 are not known; give --config"),
        ("--parallelism.data_parallel_shard_degree 2", "the degrees make 256 devices, not 128"),
        ("--parallelism.pipeline_parallel_schedule ZBVZeroBubble", "give 1F1B, Interleaved1F1B or DualPipeV"),
        ("--parallelism.pipeline_parallel_layers_per_stage 10", "it makes 7 stages of 2 pipeline ranks"),
        ("--parallelism.pipeline_parallel_microbatch_size 3", "microbatches of 3 do not divide it"),
        (
            "--parallelism.pipeline_parallel_schedule DualPipeV --training.local_batch_size 2",
            "local_batch_size = 2: DualPipeV needs 4 or more",
        ),
        ("--training.global_batch_size 24", "no multiple of local_batch_size 16 x 1 data parallel ranks"),
        ("--parallelism.expert_tensor_parallel_degree 2", "expert_tensor_parallel_degree = 2: give 1 or 4"),
        (
            "--parallelism.expert_parallel_degree 48",
            "128 devices cannot be split into TP4 PP2 VPP2 EP48 CP16",
        ),
        ("--training.enable_cpu_offload", r"\[training\] enable_cpu_offload = True: it cannot be planned"),
        ("--optimizer.name Muon", "only Adam and AdamW"),
        ("--optimizer.early_step_in_backward", "early_step_in_backward = True: it cannot be planned"),
        ("--optimizer.implementation foreach", "= 'foreach': a copy of all weights cannot be planned; leave"),
        ("--parallelism.disable_loss_parallel", "= True: whole logits on tensor parallel ranks cannot"),
        (
            "--fault_tolerance.enable",
            r"job.toml: \[fault_tolerance\] enable = True: a changing number of replicas .*; leave it out",
        ),
        (
            "--checkpoint.async_mod async",
            r"\[checkpoint\] has no setting 'async_mod' .*; did you mean async_mode",
        ),
        ("--metrics.log_frequency 1", r"\[metrics\] has no setting 'log_frequency'"),
        ("--quantize.linear.float8.emulate --quantise.linear.mx.recipe_name x", "did you mean quantize"),
    ],
)
def test_what_is_refused(job, words, message):
    with pytest.raises(SettingsError, match=message):
        job(words)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--parallelism.enable_async_tensor_parallel", "parallelism.enable_async_tensor_parallel is NOT"),
        ("--compile.enable --compile.components loss", "a compiled loss is NOT"),
        ("--compile.enable", "compiled layers are planned as fused norms and activations; the rest is NOT"),
        ("--validation.enable", "passes of validation are NOT"),
        ("--checkpoint.enable --checkpoint.async_mode async", "asynchronous checkpoints on the host are NOT"),
    ],
)
def test_what_is_left_out_is_printed(job, words, note):
    assert any(f"{note} planned" in each for each in job(words).notes)
    assert not any(note in each for each in job().notes)


def test_settings_that_do_not_matter(job):
    words = (
        "--parallelism.tensor_parallel_degree 1 --parallelism.disable_loss_parallel",
        "--parallelism.tensor_parallel_degree 1 --checkpoint.enable --training.dataloader.num_workers 4",
    )
    assert job(words[0]) == job(words[1]) == job("--parallelism.tensor_parallel_degree 1")


def test_a_module_of_the_job_adds_sections_and_settings(tmp_path):
    file = tmp_path / "job.toml"
    text = "[job]\ncustom_config_module = 'mine'\n[mine]\na = 1\n[profiling]\nranks = [0]\n"
    file.write_text(text)
    torchtitan.job_of([str(file), "--model.flavor", "8B"], None, None, None)
    file.write_text(f"{text}[training]\nmemory_ratio = 0.5\n")
    with pytest.raises(
        SettingsError, match=r"\[training\] has no setting 'memory_ratio' that can be planned"
    ):
        torchtitan.job_of([str(file), "--model.flavor", "8B"], None, None, None)


def test_files_that_are_refused(tmp_path):
    file = tmp_path / "job.toml"
    texts = {
        "[model": "cannot be read",
        "model = 3": r"write \[model\]",
        "[parallelisms]\ntensor_parallel_degree = 8": "did you mean parallelism",
        "[model]\nconverters = 'npu_dsa'": "converters = 'npu_dsa': give list",
        "[training]\nseq_len = '8k'": "seq_len = '8k': give int",
        "metrics = 3": r"write \[metrics\]",
        "[comm]\nmodes = 'default'": r"\[comm\] has no setting 'modes' .*; did you mean mode",
    }
    for text, message in texts.items():
        file.write_text(text)
        with pytest.raises(SettingsError, match=message):
            torchtitan.job_of([str(file)], None, None, None)


def test_the_command(job, tmp_path, capsys):
    file, record = tmp_path / "job.toml", tmp_path / "plan.json"
    command = ["plan", "--devices", "128", "--device", "a3", "--json", str(record)]
    changed = "--what-if=--parallelism.expert_parallel_degree 32"
    assert main([*command, changed, "--", str(file), "--model.name", "deepseek_v32"]) == 0
    said = capsys.readouterr().out
    assert "TP4 PP2 VPP2 EP64 CP16 on 128 x a3: fits" in said
    assert "planned with TorchTitan-npu's change of torch" in said
    assert "with --parallelism.expert_parallel_degree 32" in said
    whole = plan.make(job("--model.name deepseek_v32"), device("a3"))
    assert json.loads(record.read_text())["memory"][1]["total"] == whole.ranks[1].total
    assert main(["plan", "--search", str(file)]) == 2
    assert "--search and --expert-load read flags of Megatron" in capsys.readouterr().err
