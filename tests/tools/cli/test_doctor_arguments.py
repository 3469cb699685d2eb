"""``doctor`` of a whole command line: problems are exactly the arguments that the job would refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa import session
from mindspeed_dsa.patches import versions
from mindspeed_dsa.tools.cli import doctor, doctor_arguments
from mindspeed_dsa.tools.migrate import megatron_flags

DSA = (
    "--multi-latent-attention --experimental-attention-variant dsa --dsa-indexer-n-heads 64 "
    "--dsa-indexer-head-dim 128 --dsa-indexer-topk 2048 --dsa-indexer-loss-coeff 0.01 "
    "--dsa-indexer-use-sparse-loss --use-fused-dsa"
).split()


def problems_of(line: str) -> list[str]:
    found: list[str] = doctor.examine(line.split())["problems"]
    return found


def test_a_whole_job_has_megatrons_defaults_and_is_checked_with_them():
    """RoPE fusion, also a default, is switched off and is no problem."""
    job = f"pretrain_gpt.py {' '.join(DSA)}"
    (problem,) = problems_of(f"-- {job}")
    assert "--transformer-impl transformer_engine (Megatron's default) needs Transformer Engine" in problem
    assert not problems_of(f"-- torchrun --nproc-per-node 2 {job} --transformer-impl local")
    assert not problems_of(" ".join(DSA)), "of a part of a command line only what is given is judged"


@pytest.mark.parametrize("release", [*megatron_flags.releases(), "0.15.3", "0.17.1"])
def test_flags_that_active_features_add_are_known_in_every_release(monkeypatch, release):
    """Before 0.16 Megatron's parser has no flags for DSA, and dsa-backport adds them."""
    session.enable_from_argv(DSA)
    try:
        running = session.current()
        monkeypatch.setattr(versions, "of_megatron", lambda root="megatron": release)
        monkeypatch.setattr(megatron_flags, "add_installed", lambda parser, root: 1 / 0)
        parser = doctor_arguments.parser_of(running)
        assert not doctor_arguments.unknown_flags(DSA, [], parser, "megatron")
        alone = SimpleNamespace(settings=running.settings, features=[], contexts={})
        unknown = doctor_arguments.unknown_flags(DSA, [], doctor_arguments.parser_of(alone), "megatron")
        lacking = release in ("0.12.1", "0.14.0")
        assert bool(unknown) == lacking, "without the feature nobody reads them"
    finally:
        session.disable()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--optimizer adm", "refuses this command line: argument --optimizer: invalid choice: 'adm'"),
        pytest.param(
            "--num-layers two",
            "refuses this command line: argument --num-layers: invalid int value: 'two'",
            marks=pytest.mark.full,
        ),
        ("--num-layers", "refuses this command line: argument --num-layers: expected one argument"),
        ("--bf16 swap-optimizer", "'swap-optimizer' is neither a flag nor the value of one"),
        ("--swap-optimzer", "did you mean --swap-optimizer?"),
        pytest.param(
            "-- pretrain_gpt.py --num-layrs 2 --my-own 3",
            "did you mean --num-layers?",
            marks=pytest.mark.full,
        ),
        ("-- --swap-optimzer --my-own 3", "did you mean --swap-optimizer?"),
        pytest.param(
            "-- torchrun --nproc-per-node 2 pretrain_gpt.py --swap-optimzer",
            "did you mean --swap-optimizer?",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_line_about_another_job_is_a_problem(line, said):
    assert [each for each in problems_of(line) if said in each]


def test_what_megatron_derives_is_there_for_checks():
    made = doctor_arguments.parser_of(None)
    line = (
        "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--tensor-model-parallel-size 2 --sequence-parallel"
    ).split()
    settings = SimpleNamespace(chosen=dict, megatron_root="megatron")
    args, problems = doctor_arguments.read(made, SimpleNamespace(settings=settings), line, True)
    doctor_arguments.derive(args, world=8)
    assert not problems
    assert (args.world_size, args.data_parallel_size, args.virtual_pipeline_model_parallel_size) == (8, 2, 2)
    assert (args.sequence_parallel, args.expert_tensor_parallel_size) == (True, 2)
    args.tensor_parallel_num_weight_shards = 4  # from 0.19 on
    for world, replicas in ((8, 1), (0, 0), (16, 2)):
        doctor_arguments.derive(args, world)
        assert (args.world_size, args.data_parallel_size) == (world or 8, replicas)
    (problem,) = doctor_arguments.derive(args, 12)
    assert problem.startswith(
        "12 ranks are no multiple of 8, which TP 2 x PP 2 x CP 1 and EP 1 need; start 16"
    )
