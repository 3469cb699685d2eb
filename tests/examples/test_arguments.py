from __future__ import annotations

import pytest
from dsa_job.arguments import parse_args
from dsa_job.errors import UsageError
from dsa_job.flags import layer_pattern
from dsa_job.validation import World, check, data_parallel_size, padded_vocab_size

INTERLEAVED_2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"


def refusal(flags: str, ranks: int = 1) -> str:
    with pytest.raises(UsageError) as caught:
        check(parse_args(flags.split()), World(size=ranks))
    return str(caught.value)


def test_the_defaults_make_dsa_select() -> None:
    args = parse_args([])
    check(args, World())
    assert args.experimental_attention_variant == "dsa"
    assert args.seq_length >= 4 * args.dsa_indexer_topk
    assert args.dsa_indexer_n_heads >= 8
    assert args.moe_layer_freq == [0] + [1] * (args.num_layers - 1)
    assert args.moe_shared_expert_intermediate_size > 0


def test_a_misspelt_flag_is_answered_with_the_right_one() -> None:
    message = refusal("--num-layer 4 --lr 0.1 --xyzzy")
    assert "--num-layer is no flag of this job; did you mean --num-layers" in message
    assert "--xyzzy is no flag of this job; omit it: --help lists all flags" in message


def test_a_misspelt_feature_flag_is_answered_with_the_right_one() -> None:
    assert "did you mean --dsa-indexer-rope-first" in refusal("--dsa-indexer-rope-frist")


@pytest.mark.parametrize("flags", ["--num-layers many", "--num-layers", "--moe-layer-freq [0,x]", "stray"])
def test_a_value_that_does_not_fit_is_refused(flags: str) -> None:
    assert refusal(flags).count("\n") == 0


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (2, "--pipeline-model-parallel-size 2 --num-layers 5", "--num-layers 5 is not divisible"),
        (3, "--pipeline-model-parallel-size 2", "3 processes cannot be split"),
        (1, "--tensor-model-parallel-size 2", "torchrun --nproc-per-node 2"),
        (
            4,
            "--tensor-model-parallel-size 4 --num-attention-heads 6",
            "--num-attention-heads 6 is not divisible",
        ),
        (1, "--sequence-parallel", "--sequence-parallel needs"),
        (2, "--tensor-model-parallel-size 2", "experts with tensor parallelism train only with"),
        (2, "--expert-model-parallel-size 2 --num-experts 3", "--num-experts 3 is not divisible"),
        (2, "--expert-model-parallel-size 2 --num-experts 0", "needs experts"),
        (3, "", "--global-batch-size 8 is not divisible"),
        (1, "--num-virtual-stages-per-pipeline-rank 2", "interleaved pipeline needs"),
        (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3", "does not divide"),
        (
            2,
            INTERLEAVED_2 + " --no-overlap-p2p-communication",
            "over 2 ranks needs overlapped communication",
        ),
        (
            4,
            "--pipeline-model-parallel-size 4 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2",
            "cannot run 2 microbatches in groups of 4",
        ),
        (1, "--dsa-indexer-head-dim 24", "must be a power of two"),
        (1, "--moe-layer-freq [0,1]", "must be 4 zeros and ones"),
        (1, "--overlap-param-gather", "needs --use-distributed-optimizer and --overlap-grad-reduce"),
        (1, "--recompute-granularity full", "needs --recompute-method"),
        (1, "--train-iters 0 --lr-warmup-iters 0", "name a folder for them with --save"),
        (1, "--lr-warmup-iters 900 --train-iters 900", "leaves nothing of the 900 scheduled steps"),
        (1, "--split 0,5", "must be weights"),
        (1, "--split half", "must be weights"),
        (1, "--min-lr 1", "is more than --lr"),
        (1, "--train-iters -1", "--train-iters is -1; it must be at least 0"),
        (1, "--lr nan", "--lr is nan"),
        (1, "--num-layers 0", "--num-layers is 0; it must be at least 1"),
    ],
)
def test_an_impossible_combination_is_refused(ranks: int, flags: str, message: str) -> None:
    assert message in refusal(flags, ranks)


def test_all_problems_come_at_once() -> None:
    message = refusal("--sequence-parallel --dsa-indexer-head-dim 24 --overlap-param-gather")
    assert message.count("\n") == 2


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsa_job import validation

    find = validation.importlib_util.find_spec
    monkeypatch.setattr(
        validation.importlib_util, "find_spec", lambda name: None if name == "tensorboard" else find(name)
    )
    assert refusal("") == "package tensorboard is missing: pip install tensorboard, or add --no-tensorboard"
    check(parse_args(["--no-tensorboard"]), World())


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("2", 2), ("[0, 1]", [0, 1]), ("([0]*2+[1]*3)", [0, 0, 1, 1, 1]), ("([0,1]*2)", [0, 1, 0, 1])],
)
def test_layer_patterns_are_read_as_megatron_reads_them(text: str, pattern: object) -> None:
    assert layer_pattern(text) == pattern


def test_the_vocabulary_is_padded_alike_in_every_layout() -> None:
    one, two = parse_args([]), parse_args(["--tensor-model-parallel-size", "2", "--sequence-parallel"])
    assert padded_vocab_size(one, 257) == padded_vocab_size(two, 257) == 384
    assert padded_vocab_size(one, 256) == 256


@pytest.mark.parametrize("wrong", ["first", "\u00b2", "\u0663"])
def test_a_world_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert World.from_environment() == World(0, 1, 0)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    assert World.from_environment() == World(5, 8, 0)
    monkeypatch.setenv("RANK", wrong)
    with pytest.raises(UsageError, match=f"RANK is '{wrong}'"):
        World.from_environment()


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("", 10),
        ("--train-iters 10", 1),
        ("--train-iters 3", 0),
        ("--train-iters 0 --save a", 0),
        ("--train-iters 1000 --lr-decay-iters 50", 5),
        ("--train-iters 10 --lr-warmup-iters 7", 7),
    ],
)
def test_the_warm_up_shrinks_with_the_job(flags: str, steps: int) -> None:
    args = parse_args(flags.split())
    check(args, World())
    assert args.lr_warmup_iters == steps


def test_virtual_stages_follow_from_either_flag() -> None:
    common = ["--num-layers", "16", "--pipeline-model-parallel-size", "4"]
    by_layers = parse_args([*common, "--num-layers-per-virtual-pipeline-stage", "2"])
    by_stages = parse_args([*common, "--num-virtual-stages-per-pipeline-rank", "2"])
    assert by_layers.virtual_pipeline_model_parallel_size == 2
    assert by_stages.virtual_pipeline_model_parallel_size == 2
    assert by_layers.overlap_p2p_comm
    assert not parse_args(common).overlap_p2p_comm
    assert data_parallel_size(by_layers, 8) == 2
