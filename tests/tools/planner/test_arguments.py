"""From a command line to a job: sizes, defaults, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner import arguments, configs, devices, flags, memory, sizes, work
from tests.tools.planner.jobs import DEEPSEEK, DENSE, EXAMPLE, deepseek, example

SHORT = "--seq-length 512 --micro-batch-size 1 --bf16".split()
HEAVY = ("torch", "megatron", "numpy", "matplotlib")


def test_planning_imports_neither_torch_nor_megatron():
    code = f"import sys, mindspeed_dsa.tools.cli.plan; assert not {set(HEAVY)!r} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_defaults_of_the_example_job_are_those_of_its_own_table():
    from dsa_job.flags import FLAGS

    theirs = {flag.name[2:].replace("-", "_"): flag.default for flag in FLAGS.values()}
    theirs["no_overlap_p2p_communication"] = False
    options, _, _ = flags.read([flags.EXAMPLE_SCRIPT])
    # Unset flags take the library's or Megatron's own default, or follow from other flags.
    unset = {name for name, default in theirs.items() if isinstance(default, type)}
    planned = {flags.dest_of(flag[2:]) for flag in flags.planned()}
    differing = {
        name: (default, getattr(options, name))
        for name, default in theirs.items()
        if name in planned and name not in unset and getattr(options, name) != default
    }
    assert not differing
    assert set(flags.EXAMPLE) <= {*theirs, "vocab_size", "multi_latent_attention", "swiglu"} | {
        "add_bias_linear",
        "bias_swiglu_fusion",
        "position_embedding_type",
    }


def test_deepseek_has_the_parameters_of_its_report():
    model = deepseek().model
    by_part: Mapping[str, float] = sizes.by_part(sizes.model_weights(model))
    without_extras = sum(n for part, n in by_part.items() if part not in ("indexer", "MTP"))
    assert without_extras == pytest.approx(671.026e9, rel=1e-5)
    assert by_part["indexer"] == pytest.approx(0.8515e9, rel=1e-4)
    assert [sum(each.pattern) for each in (model,)] == [58]


def test_a_file_and_the_name_say_the_same(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(configs.KNOWN["deepseek-v3.2"]))
    by_file = arguments.job_of(DEEPSEEK.split(), 512, str(file))
    assert by_file == deepseek()
    fewer = arguments.job_of([*DEEPSEEK.split(), "--num-layers=61", "--num-experts", "128"], 512, str(file))
    assert fewer.model.experts == 128, "flags outrank the file"


def test_a_smaller_model_of_a_file_keeps_its_dense_layers():
    model = arguments.job_of([*DEEPSEEK.split(), "--num-layers=31"], 512, "deepseek-v3.2").model
    assert model.pattern == (False,) * 3 + (True,) * 28


@pytest.mark.parametrize("layers", [3, 12, 24, 30])
@pytest.mark.parametrize("described", [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 5, 23]}])
def test_another_number_of_layers_has_experts_where_transformers_has_them(tmp_path, layers, described):
    transformers = pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20")
    torch = pytest.importorskip("torch")
    theirs = transformers.Qwen2MoeConfig(**described, num_hidden_layers=24)
    theirs.save_pretrained(tmp_path)
    theirs.num_hidden_layers = layers
    theirs.layer_types = ["full_attention"] * layers
    with torch.device("meta"):
        built = transformers.Qwen2MoeModel(theirs)
    model = arguments.job_of(["--num-layers", str(layers), *SHORT], 1, str(tmp_path / "config.json")).model
    assert model.pattern == tuple(hasattr(layer.mlp, "experts") for layer in built.layers)


def test_a_listed_pattern_is_cut_and_not_guessed(tmp_path):
    file, words = tmp_path / "config.json", ["dense", "sparse", "dense", "sparse"]
    described = {**configs.KNOWN["deepseek-v3.2"], "num_hidden_layers": 4, "mlp_layer_types": words}
    file.write_text(json.dumps(described))
    assert arguments.job_of(["--num-layers", "3", *SHORT], 1, str(file)).model.pattern == (False, True, False)
    with pytest.raises(SettingsError, match=r"is for 4 layers, and --num-layers is 5; .*--moe-layer-freq"):
        arguments.job_of(["--num-layers", "5", *SHORT], 1, str(file))
    given = ["--num-layers", "5", "--moe-layer-freq", "[0,1,0,1,1]", *SHORT]
    assert arguments.job_of(given, 1, str(file)).model.pattern == (False, True, False, True, True)
    file.write_text(json.dumps({**described, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}))
    model = arguments.job_of(["--num-layers", "6", *SHORT], 1, str(file)).model
    assert model.pattern == (False,) * 2 + (True,) * 4


@pytest.mark.parametrize(
    ("flags", "gradient", "products"),
    [
        ("", None, 3),
        ("--fused-linear-cross-entropy", False, 4),
        ("--fused-linear-cross-entropy --fused-linear-cross-entropy-gradient forward", True, 3),
    ],
    ids=["whole logits", "left open", "in forward"],
)
def test_a_loss_in_chunks_keeps_no_logits(flags, gradient, products):
    job = deepseek(flags)
    logits = 4096 * 129_280 * 4
    last, stock = (memory.of_job(part_or_job, 0.0)[-1] for part_or_job in (job, deepseek()))
    for part in ("output", "MTP"):
        difference = stock.activations[part] - last.activations[part]
        if gradient is None:
            assert difference == 0
        elif gradient:
            assert difference == pytest.approx(logits - 7168 * 129_280 * 4, rel=0.05)
        else:
            assert difference == pytest.approx(logits, rel=0.01)
    if gradient is not None:
        assert last.temporary["logits"] < stock.temporary["logits"]
    (output,) = (
        part_or_job
        for part_or_job in work.chunk(job, job.layout.pp - 1, job.layout.vpp - 1)
        if part_or_job.part == "output"
    )
    assert output.forward + output.backward == products * 2 * 129_280 * 7168 * 4096


def test_counted_embedding_and_loss_are_layers_of_virtual_stages():
    job = example(
        "--num-layers 14 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4"
    )
    assert job.layout.vpp == 2


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--bf16", 4),
        ("--bf16 --grad-reduce-in-bf16", 2),
        ("--fp16", 2),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", 4),
        ("", 4),
    ],
)
def test_gradients_are_as_wide_as_in_megatron(flags, size):
    assert arguments.job_of(["pretrain_dsa.py", *flags.split()]).training.grad_number == size


def test_flags_that_change_a_plan_and_are_not_planned_say_so():
    notes = example("--fp4-format e2m1 --lr 1e-4 --spec a b --tensor-model-paralel-size 8").notes
    (note,) = (note for note in notes if "NOT planned" in note)
    assert note.endswith("depend on them: --fp4-format, --spec")
    assert any("did you mean --tensor-model-parallel-size?" in note for note in notes)
    assert any("allgather" in note for note in deepseek().notes)
    assert not any("allgather" in note for note in deepseek("--moe-token-dispatcher-type alltoall").notes)


def test_flags_that_no_plan_needs_are_noted():
    job = example("--lr 1e-4 --data somewhere --swap-optimizer")
    assert job.features.swap_optimizer
    assert any("--lr, --data" in note for note in job.notes)


SCHEDULE = [*DENSE.split(), "--step-batch-size-schedule"]


def test_a_schedule_of_batches_is_planned_by_its_largest():
    job = arguments.job_of([*SCHEDULE, "0:16 1B:64 2B:32"], 8)
    assert job.training.batch == 64
    assert job.microbatches == 64 // (job.training.micro * job.layout.dp)
    assert any("steps have 16, 64, 32 samples; planned are those of 64" in note for note in job.notes)
    assert not any("no --global-batch-size" in note for note in job.notes)


@pytest.mark.parametrize(
    ("job", "problem", "way_out"),
    [
        (
            lambda: arguments.job_of([*SCHEDULE, "0:4 1B:64"], 8),
            "--step-batch-size-schedule 4 is no multiple of --micro-batch-size 2 x data parallel 8",
            "with sizes 16 64 in --step-batch-size-schedule",
        ),
        (
            lambda: arguments.job_of([*SCHEDULE, "0:64", "--global-batch-size", "64"], 8),
            "--step-batch-size-schedule and --global-batch-size",
            "give one of them",
        ),
        (lambda: arguments.job_of([*SCHEDULE, "64"], 8), "'64' does not read", "write '0:768 250B:1536'"),
        (
            lambda: example("--tensor-model-parallel-size 3", 3),
            "--num-attention-heads 4",
            "DP3 with --global-batch-size 12",
        ),
        (lambda: example("--expert-model-parallel-size 8", 8), "--num-experts 4", "EP4"),
        (lambda: example("--pipeline-model-parallel-size 3", 3), "dealt out to 3", "-num-layers"),
        (lambda: example("--tensor-model-parallel-size 4 --sequence-parallel", 6), "multiple of 4", "4 or 8"),
        (lambda: example("--tensor-model-parallel-size 2", 2), "--sequence-parallel", "need"),
        (lambda: example("--global-batch-size 9", 2), "no multiple", "--global-batch-size 8"),
        (
            lambda: example("--num-layers 17 --pipeline-model-parallel-size 16"),
            "dealt out to 16",
            "PP16 --decoder-last-pipeline-num-layers 2",
        ),
        (lambda: deepseek("--pipeline-model-parallel-size 8"), "dealt out to 8", "--decoder-last-"),
        (lambda: arguments.job_of(["--num-layers", "2"]), "--hidden-size", "--config FILE"),
        (lambda: arguments.job_of("train.sh --num-layers 2".split()), "train.sh", "pretrain_gpt.py"),
        (lambda: arguments.job_of(EXAMPLE.split(), None, "nowhere.json"), "nowhere.json", "deepseek-v3.2"),
        (lambda: devices.device("h2000"), "no device 'h2000'", "did you mean h200"),
        (
            lambda: arguments.job_of([*DENSE.split(), "--group-query-attention", "--num-query-groups", "6"]),
            "--num-attention-heads 16 is not divisible by --num-query-groups 6",
            "",
        ),
        (lambda: devices.device("xyz"), "no device 'xyz'. The table", "h200"),
        (lambda: devices.device("h200", link=0.0), "--device-link 0", "above 0"),
        (lambda: example("--tensor-model-parallel-size 0"), "--tensor-model-parallel-size 0", "1 or more"),
        (lambda: example("--tensor-model-parallel-size -2"), "--tensor-model-parallel-size -2", "1 or more"),
        (lambda: example("--micro-batch-size 0"), "--micro-batch-size 0", "1 or more"),
        (lambda: example("", 0), "--devices 0", "1 device"),
        (lambda: arguments.job_of(EXAMPLE.split(), imbalance=0.5), "--imbalance 0.5", "1 or more"),
        (lambda: example("--virtual-optimizer much"), "--virtual-optimizer much", "GiB"),
        (
            lambda: example("--normalization RMSNrom"),
            "'RMSNrom'",
            "'LayerNorm', 'RMSNorm'|LayerNorm, RMSNorm",
        ),
        (
            lambda: example("--swap-optimizer --virtual-optimizer all"),
            "cannot be combined",
            "--swap-optimizer",
        ),
        (lambda: example("--use-torch-fsdp2"), "optimizer state itself", "omit --use-distributed-optimizer"),
        (
            lambda: deepseek(
                "--no-use-distributed-optimizer --use-torch-fsdp2 --fsdp2-sharding-size 24 "
                "--untie-embeddings-and-output-weights"
            ),
            "does not divide the 32 ranks",
            "8 does",
        ),
        (
            lambda: deepseek("--no-use-distributed-optimizer --use-torch-fsdp2 --fsdp2-sharding-size 1"),
            "--fsdp2-sharding-size 1",
            "2 or more",
        ),
        (lambda: example("--fp16"), "--bf16 and --fp16", "one of them"),
        (lambda: example("--num-experts 0 --expert-model-parallel-size 2"), "size 2", "needs --num-experts"),
        (lambda: deepseek("--expert-model-parallel-size 7", None), "not divisible by expert", "EP8"),
        (lambda: deepseek("--no-disable-bias-linear"), "no biases", "add --disable-bias-linear"),
        (
            lambda: example(
                "--num-layers 12 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4"
            ),
            "--num-layers-per-virtual-pipeline-stage 4",
            "--num-layers 8 or 16",
        ),
        (
            lambda: example(
                "--num-layers 12 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 "
                "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
            ),
            "the 14 layers",
            "--num-layers 6 or 14",
        ),
        (
            lambda: example(
                "--num-layers 8 --pipeline-model-parallel-size 4 --account-for-loss-in-pipeline-split", 8
            ),
            "--num-layers 8, 9 with embedding and loss, cannot be dealt out to 4 pipeline ranks.",
            "works",
        ),
        (
            lambda: example(
                "--num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
                "--microbatch-group-size-per-virtual-pipeline-stage 2 --global-batch-size 64",
                8,
            ),
            "cannot be interleaved in groups of 2",
            "--microbatch-group-size-per-virtual-pipeline-stage 4, or a number up to",
        ),
    ],
)
def test_bad_input_is_one_message_with_a_way_out(job, problem, way_out):
    with pytest.raises(SettingsError) as caught:
        job()
    message = str(caught.value)
    assert problem in message
    assert any(word in message for word in way_out.split("|")), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_size": "7168"}, "hidden_size is '7168'"),
        ({"n_routed_experts": 0}, "n_routed_experts is 0"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ],
)
def test_the_configuration_of_another_model_is_refused(tmp_path, changed, problem):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**configs.KNOWN["deepseek-v3.2"], **changed}))
    with pytest.raises(SettingsError, match=f"{problem}.*or omit --config, and give the sizes by Megatron's"):
        arguments.job_of(DEEPSEEK.split(), 512, str(file))
