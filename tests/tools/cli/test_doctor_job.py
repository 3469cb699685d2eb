"""``doctor --job``: command lines as typed, also MindSpeed-LLM's, and without torch or Megatron."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.session.environment import installation
from mindspeed_dsa.tools.cli.doctor_job import Command
from mindspeed_dsa.tools.planner.checkpoint import size_of
from tests.support import warm

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 1024 --seq-length 128 "
    "--micro-batch-size 1 --swiglu --disable-bias-linear"
).split()
# Sizes and switches of MindSpeed-LLM's script for DeepSeek-V3.2 on Atlas A3, and its variables.
LLM = (
    "--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec --multi-latent-attention "
    "--qk-pos-emb-head-dim 64 --qk-head-dim 128 --q-lora-rank 1536 --kv-lora-rank 512 --v-head-dim 128 "
    "--qk-layernorm --moe-grouped-gemm --moe-permutation-async-comm --moe-token-dispatcher-type alltoall "
    "--first-k-dense-replace 3 --moe-layer-freq 1 --moe-shared-expert-intermediate-size 2048 "
    "--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --expert-tensor-parallel-size 1 "
    "--mtp-num-layers 1 --moe-fb-overlap "
    "--num-layers-per-virtual-pipeline-stage 2 --swap-optimizer --enable-dsa-indexer "
    "--use-fused-lightning-indexer --index-topk 1024 --no-shared-storage --transformer-impl local "
    "--noop-layers 7,62,63 --use-distributed-optimizer --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 8 --expert-model-parallel-size 64 --sequence-parallel --num-layers 64 "
    "--hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --seq-length 4096 "
    "--micro-batch-size 1 --global-batch-size 7680 --make-vocab-size-divisible-by 1 --train-iters 2000 "
    "--untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --vocab-size 129280 --padded-vocab-size 129280 --bf16 "
    "--distributed-timeout-minutes 120 --save-interval 2000 --no-save-optim"
).split()
LLM_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CPU_AFFINITY_CONF": "1",
    "TASK_QUEUE_ENABLE": "2",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_CONNECT_TIMEOUT": "3600",
    "HCCL_EXEC_TIMEOUT": "3600",
    "STREAMS_PER_DEVICE": "32",
}
LAUNCH = "python -m torch.distributed.launch --nproc_per_node 16 --nnodes 32 --node_rank 0".split()

WITHOUT = """\
import sys
from importlib.machinery import PathFinder

original = PathFinder.find_spec.__func__


def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in ("torch", "megatron") else original(cls, name, path, target)


PathFinder.find_spec = classmethod(find_spec)
from mindspeed_dsa.__main__ import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Run the command with variables; return its status and its findings about the environment."""
    for name in (*LLM_VARIABLES, "NCCL_ALGO", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def run(*words, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        status = main(["doctor", "--json", "--job", "--", *words])
        findings = json.loads(capsys.readouterr().out)
        return status, {each["check"]: each for each in findings["environment"]}, findings

    return run


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--bf16 --save a.py", ("", "", "--bf16 --save a.py")),
        ("pretrain_gpt.py --bf16", ("", "pretrain_gpt.py", "--bf16")),
        (
            "torchrun --nproc-per-node 2 x/train.py --bf16",
            ("torchrun --nproc-per-node 2", "x/train.py", "--bf16"),
        ),
        (
            "torchrun --nproc-per-node 2 examples/megatron_lm/run_megatron.py pretrain_gpt.py --bf16",
            ("torchrun --nproc-per-node 2 examples/megatron_lm/run_megatron.py", "pretrain_gpt.py", "--bf16"),
        ),
        ("torchrun train.py configs/x.py", ("torchrun", "train.py", "configs/x.py")),
        ("", ("", "", "")),
    ],
)
def test_a_command_line_is_taken_apart(line, parts):
    command = Command.of(line.split())
    assert (" ".join(command.launcher), command.script, " ".join(command.flags)) == parts
    assert Command.of(line.split(), ["--fp16"]).flags == (*command.flags, "--fp16")


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("torchrun --nproc-per-node 4 --nnodes=3", ("4", "12")),
        ("torchrun --nproc_per_node=4", ("4", "4")),
        ("torchrun --nproc-per-node gpu", (None, None)),
        ("torchrun", ("1", "1")),
        ("srun torchrun --nproc-per-node 4 --nnodes 2", ("4", "8")),
        ("srun -n 16 python -u", (None, "16")),
        ("mpirun -np 8 nice -n 10 python", (None, "8")),
        ("srun --ntasks=16 python", (None, "16")),
        ("python", (None, None)),
    ],
)
def test_the_launcher_says_how_many_ranks_there_are(monkeypatch, launcher, ranks):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    variables = Command.of([*launcher.split(), "train.py"]).variables()
    assert (variables.get("LOCAL_WORLD_SIZE"), variables.get("WORLD_SIZE")) == ranks
    assert variables.get("OMP_NUM_THREADS") == ("1" if ranks[0] == "4" else None), "which torchrun sets"


@pytest.mark.parametrize("launcher", ["env A=1 B=2=3 torchrun", "A=1 B=2=3 python"])
def test_variables_of_the_command_line_are_the_jobs(monkeypatch, launcher):
    monkeypatch.setenv("WORLD_SIZE", "16")
    variables = Command.of([*launcher.split(), "train.py", "--x", "C=4"]).variables()
    assert (variables["A"], variables["B"], "C" in variables) == ("1", "2=3", False)
    assert variables["WORLD_SIZE"] == ("1" if "torchrun" in launcher else "16")


def test_ranks_that_the_layout_does_not_divide_are_a_problem(doctor):
    job = ["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *MODEL, "--transformer-impl", "local"]
    _, _, findings = doctor(*job, "--tensor-model-parallel-size", "4")
    assert [each for each in findings["problems"] if "2 ranks are no multiple of 4" in each]


def test_an_error_of_the_environment_is_the_exit_status(doctor, monkeypatch):
    monkeypatch.setattr(installation, "_free", lambda folder: 2**20 if folder.name == "shm" else 2**50)
    job = ["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *MODEL, "--num-workers"]
    status, by_name, findings = doctor(*job, "64")
    assert (status, findings["problems"]) == (1, [])
    assert by_name["shared-memory"]["level"] == "error"
    status, by_name, findings = doctor(*job, "0")
    assert (status, by_name) == (0, {})


def test_flags_are_read_with_the_defaults_of_the_job(doctor):
    """Megatron-LM's data loader has two workers, the example none."""
    from mindspeed_dsa.tools.cli import doctor_job

    args = doctor_job._arguments(["pretrain_gpt.py", *MODEL], example=False)
    assert (args.num_workers, args.distributed_timeout_minutes) == (2, 10)
    assert args.create_attention_mask_in_dataloader
    args = doctor_job._arguments(
        ["pretrain_gpt.py", "--optimizer", "none-that-is-planned", "--async-save"], example=False
    )
    assert args.async_save, "also where the planner refuses a value"
    assert doctor_job._arguments(["pretrain_dsa.py"], example=True).num_workers == 0


def test_the_text_has_a_line_for_each_finding(monkeypatch, capsys):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert main(["doctor", "--job", "--", *MODEL]) == 0
    printed = capsys.readouterr().out
    assert "environment:\n  WARNING: TORCH_DISTRIBUTED_DEBUG=DETAIL: " in printed
    assert printed.startswith("no problems found; 1 warning below\n")


def test_without_torch_and_megatron_the_rest_is_printed(tmp_path):
    script = tmp_path / "without.py"
    script.write_text(WITHOUT, encoding="utf-8")
    job = ["--json", "--job", "--", *MODEL, "--swap-optimizer", "--mindspeed-platform", "npu"]
    command = ["env", "HCCL_OP_EXPANSION_MODE=AIV", sys.executable, str(script), "doctor"]
    done = subprocess.run(
        [*command, *job, "--overlap-grad-reduce"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    findings = json.loads(done.stdout)
    assert findings["problems"] == ["torch is not installed; pip install torch"]
    (expansion,) = (each for each in findings["environment"] if each["check"] == "hccl-expansion-mode")
    assert "the reduction of gradients (--overlap-grad-reduce)" in expansion["what"]


def test_the_script_of_mindspeed_llm(doctor, tmp_path):
    """Without an NPU, only variables that an article warns of give findings, not the script's own."""
    job = [*LAUNCH, "pretrain_gpt.py", *LLM, "--accept-mindspeed-flags", "--mindspeed-platform", "npu"]
    _, by_name, _ = doctor(*job, **LLM_VARIABLES)
    assert by_name == {}
    _, by_name, _ = doctor(*job, HCCL_OP_EXPANSION_MODE="AIV", HCCL_BUFFSIZE="100", TASK_QUEUE_ENABLE="0")
    assert by_name.keys() == {"hccl-expansion-mode", "hccl-timeouts", "hccl-buffer", "task-queue"}
    assert "all-to-alls of experts (moe-fb-overlap)" in by_name["hccl-expansion-mode"]["what"]
    assert "send 112 MB" in by_name["hccl-buffer"]["what"]  # 4096 rows / TP4 x 8 experts x 7168 x 2 bytes


def test_the_size_of_deepseek(tmp_path):
    """671 billion parameters, and 14 billion of the multi-token prediction layer."""
    from mindspeed_dsa.tools.migrate.accept import accept

    flags = [*LLM, "--accept-mindspeed-flags"]
    accept(flags)
    weights = size_of(["pretrain_gpt.py", *flags])
    assert weights == pytest.approx(2 * 685e9, rel=0.01)
    flags.remove("--no-save-optim")
    assert size_of(["pretrain_gpt.py", *flags]) == pytest.approx(7 * weights)
    assert size_of(["pretrain_gpt.py", "--bf16"]) is None


@pytest.mark.full
@pytest.mark.parametrize(
    "flags", ["--use-distributed-optimizer", "--bf16", "--no-save-optim", "--optimizer sgd"]
)
def test_a_planned_checkpoint_is_as_large_as_a_saved_one(tmp_path, flags):
    job = ["examples/pretrain_dsa.py", *flags.split(), "--train-iters", "1", "--eval-iters", "0"]
    done = warm.run(
        [sys.executable, *job, "--output-dir", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (saved,) = (tmp_path / "checkpoints").glob("iter_*")
    written = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    # Names, shapes, generators and padding add 0.3 to 1 MB to the numbers.
    assert 0 < written - size_of(job) < 1.2e6
