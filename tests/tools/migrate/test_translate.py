"""Command lines of MindSpeed, and their translations."""

from __future__ import annotations

import pytest
from packaging.version import Version

from mindspeed_dsa.tools.migrate.job import split
from mindspeed_dsa.tools.migrate.translate import quoted, translate, words


def translated(text, release=None):
    return translate(split(text.split())[1], Version(release) if release else None)


def command(text, release=None):
    translation = translated(text, release)
    assert not translation.refused, translation.refused
    assert not translation.problems, translation.problems
    return " ".join(words(translation.flags))


INDEXER = "--enable-dsa-indexer --index-topk 1024"
OF_THE_INDEXER = (
    "--experimental-attention-variant dsa --dsa-indexer-use-sparse-loss --dsa-indexer-n-heads 64 "
    "--dsa-indexer-head-dim 128 --dsa-indexer-loss-coeff 1.0 --dsa-indexer-k-norm-epsilon 1e-6 "
    "--dsa-indexer-k-norm-fp32"
)
YARN = "--multi-latent-attention --rope-scaling-type yarn"
SCALES = "--rope-scaling-mscale 1.0 --rope-scaling-mscale-all-dim 1.0"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Renamed, with the same or with other values.
        ("--qk-rope-head-dim 64 --qk-nope-head-dim=128", "--qk-pos-emb-head-dim 64 --qk-head-dim 128"),
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path /t",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /t",
        ),
        ("--tokenizer-type GPT2BPETokenizer", "--tokenizer-type GPT2BPETokenizer"),
        ("--router-gating-in-fp32 --op-cal-tflops", "--moe-router-dtype fp32 --log-throughput"),
        # Not needed, ours, unknown, and given twice.
        (
            "--use-fused-rmsnorm --swap-optimizer --swap-optimizer-times 4",
            "--swap-optimizer --swap-optimizer-times 4",
        ),
        ("--swap-optimizer-times 4 --mine 1 --mine 2", "--mine 1 --mine 2"),
        ("--moe-zero-memory level0", ""),
        (
            "--schedules-method dualpipev --dualpipev-dw-detach",
            "--schedules-method dualpipev --dualpipev-dw-detach",
        ),
        # Experts.
        (
            "--n-shared-experts 2 --moe-ffn-hidden-size 32",
            "--moe-shared-expert-intermediate-size 64 --moe-ffn-hidden-size 32",
        ),
        (
            "--n-shared-experts 2 --ffn-hidden-size 8",
            "--moe-shared-expert-intermediate-size 16 --ffn-hidden-size 8",
        ),
        (
            "--n-shared-experts 2 --moe-shared-expert-intermediate-size 5",
            "--moe-shared-expert-intermediate-size 5",
        ),
        ("--seq-aux --moe-router-load-balancing-type none", "--moe-router-load-balancing-type seq_aux_loss"),
        ("--seq-aux", ""),
        ("--norm-topk-prob --moe-router-pre-softmax", ""),
        (
            "--moe-router-load-balancing-type softmax_topk",
            "--moe-router-load-balancing-type none --moe-router-pre-softmax",
        ),
        (
            "--moe-router-load-balancing-type softmax_topk --norm-topk-prob",
            "--moe-router-load-balancing-type none",
        ),
        ("--moe-token-dispatcher-type alltoall_seq", "--moe-token-dispatcher-type alltoall"),
        # Layers.
        ("--num-layers 4 --first-k-dense-replace -1", "--num-layers 4 --moe-layer-freq ([1]*4)"),
        ("--num-layers 4 --first-k-dense-replace 1", "--num-layers 4 --moe-layer-freq ([0]*1+[1]*3)"),
        (
            "--num-layers 5 --first-k-dense-replace 1 --moe-layer-freq 2 --noop-layers 4",
            "--num-layers 4 --moe-layer-freq ([0]*2+[1]*1+[0]*1)",
        ),
        (
            "--num-layers 8 --noop-layers 7 --pipeline-model-parallel-size 4",
            "--num-layers 7 --decoder-last-pipeline-num-layers 1 --pipeline-model-parallel-size 4",
        ),
        (
            (
                "--num-layers 8 --noop-layers 0,7 --pipeline-model-parallel-size 2 "
                "--num-layers-per-virtual-pipeline-stage 2 --mtp-num-layers 1"
            ),
            (
                "--num-layers 6 --pipeline-model-parallel-layout Et|t*2|t*2|tmL "
                "--pipeline-model-parallel-size 2 --mtp-num-layers 1"
            ),
        ),
        (
            (
                "--schedules-method dualpipev --moe-fb-overlap --num-layers 8 --noop-layers 6,7 "
                "--pipeline-model-parallel-size 2 --mtp-num-layers 1"
            ),
            (
                "--schedules-method dualpipev --moe-fb-overlap --num-layers 6 "
                "--pipeline-model-parallel-layout Et*2|t*2|t*2|mL --pipeline-model-parallel-size 2 "
                "--mtp-num-layers 1"
            ),
        ),
        (
            "--num-layers 4 --noop-layers 1,3 --pipeline-model-parallel-size 1 --schedules-method dualpipev",
            "--num-layers 2 --pipeline-model-parallel-size 1 --schedules-method dualpipev",
        ),
        (
            "--num-layers 8 --noop-layers 3,7 --pipeline-model-parallel-size 2",
            "--num-layers 6 --pipeline-model-parallel-size 2",
        ),
        (
            "--num-layers 7 --num-layer-list 1,3,2,1 --pipeline-model-parallel-size 4",
            "--num-layers 7 --pipeline-model-parallel-layout Et|t*3|t*2|tL --pipeline-model-parallel-size 4",
        ),
        (
            "--num-layers 6 --pipeline-num-transformer-layers [[1,2],[2,1]] --pipeline-model-parallel-size 2",
            "--num-layers 6 --pipeline-model-parallel-layout Et|t*2|t*2|tL --pipeline-model-parallel-size 2",
        ),
        # Rotary embeddings.
        (
            f"{YARN} --rope-scaling-factor 40 --beta-fast 32 --rope-scaling-mscale 0.7",
            "--multi-latent-attention --rotary-scaling-factor 40 --mscale 0.7",
        ),
        (
            f"{YARN} --rope-scaling-original-max-position-embeddings 202752 --beta-fast 1 --beta-slow 1.0",
            (
                "--multi-latent-attention --rotary-scaling-factor 8.0 "
                "--yarn-original-max-position-embeddings 202752 --yarn-beta-fast 1"
            ),
        ),
        (
            f"{YARN} --rope-scaling-factor 4 --rope-scaling-beta-slow $SLOW",
            "--multi-latent-attention --rotary-scaling-factor 4 --yarn-beta-slow $SLOW",
        ),
        (
            f"{YARN} --rope-scaling-original-max-position-embeddings 4096 --max-position-embeddings 8192",
            "--multi-latent-attention --rotary-scaling-factor 8.0 --max-position-embeddings 8192",
        ),
        (
            "--rope-scaling-type llama3 --rope-scaling-factor 8 --low-freq-factor 1.0",
            "--use-rope-scaling --rope-scaling-factor 8",
        ),
        # Overlaps that MindSpeed would not run.
        ("--coc-fused-kernel --coc-parallel-num 4", ""),
        ("--use-ascend-coc --coc-fused-kernel --coc-parallel-num 4", "--use-ascend-coc --coc-fused-kernel"),
        ("--use-ascend-coc --coc-mode 0 --coc-parallel-num 2", ""),
        ("--context-parallel-algo ulysses_cp_algo --context-parallel-size 1", "--context-parallel-size 1"),
        ("--moe-fb-overlap --pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2"),
        (
            "--moe-fb-overlap --recompute-granularity full",
            "--moe-fb-overlap --recompute-granularity full",
        ),
        (
            "--moe-fb-overlap --recompute-granularity full --fp8-format e4m3",
            "--recompute-granularity full --fp8-format e4m3",
        ),
        (
            "--moe-fb-overlap --recompute-granularity full --fp8-format e4m3 --fp8-recipe blockwise",
            "--moe-fb-overlap --recompute-granularity full --fp8-format e4m3 --fp8-recipe blockwise",
        ),
        (
            "--moe-fb-overlap --expert-model-parallel-size 8 --micro-batch-size 2 --global-batch-size 16",
            "--expert-model-parallel-size 8 --micro-batch-size 2 --global-batch-size 16",
        ),
        (
            "--moe-fb-overlap --expert-model-parallel-size 8 --micro-batch-size 2 --global-batch-size 32",
            "--moe-fb-overlap --expert-model-parallel-size 8 --micro-batch-size 2 --global-batch-size 32",
        ),
        (
            "--moe-fb-overlap --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            "--moe-fb-overlap --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        ),
        (
            "--context-parallel-size 2 --context-parallel-algo hybrid_cp_algo",
            "--context-parallel-size 2 --context-parallel-algo hybrid_cp_algo",
        ),
        (
            "--context-parallel-algo ulysses_cp_algo --context-parallel-size $CP",
            "--context-parallel-algo ulysses_cp_algo --context-parallel-size $CP",
        ),
        ("--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb", ""),
        (
            (
                "--swiglu --use-fused-swiglu --normalization RMSNorm --use-fused-rmsnorm --transformer-impl "
                "local "
                "--use-fused-rotary-pos-emb --position-embedding-type rope"
            ),
            (
                "--swiglu --use-fused-swiglu --normalization RMSNorm --use-fused-rmsnorm --transformer-impl "
                "local "
                "--use-fused-rotary-pos-emb --position-embedding-type rope"
            ),
        ),
        (
            (
                f"{INDEXER} --enable-mla-absorb --context-parallel-size 2 "
                "--context-parallel-algo ulysses_cp_algo"
            ),
            (
                f"{OF_THE_INDEXER} --dsa-indexer-topk 1024 --use-dsa-absorb --context-parallel-size 2 "
                "--context-parallel-algo kvallgather_cp_algo"
            ),
        ),
        ("--use-flash-attn --reset-attention-mask", "--reset-attention-mask"),
        (
            "--disable-gloo-group --ckpt-format torch_dist",
            "--disable-gloo-process-groups --ckpt-format torch_dist",
        ),
        ("--disable-gloo-group --ckpt-format torch", "--ckpt-format torch"),
        ("--recompute-in-advance --bf16", "--bf16"),
        (
            "--swap-optimizer --swap-optimizer-times 4 --fp8-format e4m3 --fp8-param-gather",
            "--fp8-format e4m3 --fp8-param-gather",
        ),
        (
            "--swap-optimizer --swap-optimizer-times 4 --fp8-format e4m3",
            "--swap-optimizer --swap-optimizer-times 4 --fp8-format e4m3",
        ),
        (
            "--swap-attention --swap-modules mlp --recompute-granularity full --recompute-method uniform",
            "--recompute-granularity full --recompute-method uniform",
        ),
        (
            "--use-ascend-coc --coc-parallel-num 2 --tensor-model-parallel-size 1",
            "--tensor-model-parallel-size 1",
        ),
        (
            (
                "--use-flash-attn --reset-attention-mask --eod-mask-loss --multi-latent-attention "
                "--transformer-impl local"
            ),
            (
                "--use-flash-attn --pack-documents --eod-mask-loss --multi-latent-attention "
                "--transformer-impl local"
            ),
        ),
        # Dependent on other flags.
        ("--enable-hf2mg-convert --model-type-hf deepseek3", ""),
        ("--init-norm-weight-in-fp32", ""),
        ("--bf16 --init-norm-weight-in-fp32", "--bf16 --init-norm-weight-in-fp32"),
        ("--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec", ""),
        ("--spec my.own layer", "--spec my.own layer"),
        ("--sparse-mode 2 --pre-tockens 65536 --seq-length 4096", "--seq-length 4096"),
        (
            "--reset-attention-mask --transformer-impl local",
            "--reset-attention-mask --transformer-impl local",
        ),
        (
            "--multi-latent-attention --transformer-impl local --reset-attention-mask --eod-mask-loss",
            "--multi-latent-attention --transformer-impl local --pack-documents --eod-mask-loss",
        ),
        ("--optimizer muon", "--optimizer muon --muon-momentum 0.95"),
    ],
)
def test_the_new_command_line(old, new):
    assert command(old) == new


@pytest.mark.parametrize("release", ["0.12.1", "0.16.1", "0.18.2"])
def test_the_indexer_gets_what_mindspeed_llm_has_by_default(release):
    new = command(f"{INDEXER} --use-sparse-flash-attn --use-fused-lightning-indexer-loss", release)
    assert new == (
        f"{OF_THE_INDEXER} --dsa-indexer-rope-first --dsa-indexer-topk 1024 "
        "--use-fused-sparse-flash-attention --use-fused-lightning-indexer-kl-loss"
    )
    assert command(new, release) == new  # this library adds DSA's flags to 0.12.1


@pytest.mark.parametrize(
    ("release", "layout"),
    [
        ("0.12.1", " --dsa-indexer-rope-first --dsa-indexer-normalised-query"),
        ("0.16.1", " --dsa-indexer-rope-first --dsa-indexer-normalised-query"),
        ("0.18.2", " --dsa-indexer-rope-first --dsa-indexer-normalised-query"),
        ("0.19.0", ""),
        (None, ""),
    ],
)
def test_absorbed_the_indexer_reads_the_normalised_query(release, layout):
    """MindSpeed-LLM's indexer then reads it; Megatron 0.19's always does."""
    text = f"{INDEXER} --enable-mla-absorb"
    assert command(text, release) == f"{OF_THE_INDEXER}{layout} --dsa-indexer-topk 1024 --use-dsa-absorb"
    (outcome,) = (
        each for each in translated(text, release).outcomes if each.given.flag == INDEXER.split()[0]
    )
    assert "latent query after its norm" in outcome.why


@pytest.mark.parametrize(("release", "asked"), [("0.16.1", True), ("0.19.0", False)])
def test_context_parallel_ranks_need_the_operators_here_before_0_19(release, asked):
    line = f"{INDEXER} --enable-mla-absorb --context-parallel-size 2"
    assert ("--use-fused-dsa" in command(line, release).split()) == asked


def test_what_is_read_before_the_norm_is_refused_where_megatron_reads_it_after():
    assert "before its norm" in translated(INDEXER, "0.16.1").outcomes[0].why
    for release in ("0.19.0", None):
        (refused,) = translated(INDEXER, release).refused
        assert refused.given.flag == "--enable-dsa-indexer"
        assert "add --enable-mla-absorb" in refused.why


def test_reasons_name_what_there_is():
    def why(text):
        return translated(text, "0.16.1").outcomes[-1].why

    assert "deepseek32 (deepseek_v32)" in why("--load /w --model-type-hf glm45 --enable-hf2mg-convert")
    assert why("--transformer-impl local --use-flash-attn") == "flash-attention serves it."
    assert "Transformer Engine's attention runs" in why("--use-flash-attn")
    assert command("--use-flash-attn", "0.16.1") == "--use-flash-attn"
    assert why("--use-flesh-attn").endswith("did you mean --use-flash-attn?")
    assert why("--mine").endswith("it stays as it is.")
    assert "--fused-adam" in why("--optimizer-selection fused_adamw")
    assert "Grouped experts add" in why("--gemm-gradient-accumulation-fusion")
    assert command("--gemm-gradient-accumulation-fusion", "0.16.1") == "--gemm-gradient-accumulation-fusion"


def test_older_releases_read_yarn_elsewhere():
    old = f"{YARN} --rope-scaling-factor 4 --max-position-embeddings 16384"
    old += " --rope-scaling-original-max-position-embeddings 4096"
    assert "--max-position-embeddings 16384" in command(old, "0.16.1")
    assert "--max-position-embeddings 4096" in command(f"{old} {SCALES}", "0.12.1")
    assert not translated(f"{old} {SCALES}", "0.12.1").refused
    for scale in ("", "--rope-scaling-mscale 1.0"):
        assert translated(f"{old} {scale}", "0.12.1").refused


def test_a_feature_that_the_release_lacks_is_left_out_with_a_note():
    """MindSpeed runs on 0.12.1; a feature that only changes speed or memory must not stop a job there."""
    text = (
        "--moe-fb-overlap --use-ascend-coc --context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"
    )
    translation = translated(text, "0.12.1")
    (unserved,) = translation.of("not served")
    assert unserved.given.flag == "--moe-fb-overlap"
    assert unserved.why.startswith("It needs megatron-core >=0.14")
    assert not translation.refused
    assert "--moe-fb-overlap" not in words(translation.flags)
    assert "--use-ascend-coc" in words(translation.flags)
    assert "--moe-fb-overlap" in command(text, "0.16.1")
    assert command(text) == text


def test_a_padded_vocabulary_on_a_release_without_that_flag():
    size = "--vocab-size 1000 --make-vocab-size-divisible-by 64 --tensor-model-parallel-size 2"
    assert "--padded-vocab-size" not in command(f"{size} --padded-vocab-size 1024", "0.12.1")
    (problem,) = translated(f"{size} --padded-vocab-size 1100", "0.12.1").problems
    assert problem.startswith(
        "--padded-vocab-size is a flag of Megatron-core 0.14.0 and later, and Megatron-core 0.12"
    )


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("--fix-router", "--fix-router"),
        ("--bf16 --rmsnorm-weight-in-fp32", "--rmsnorm-weight-in-fp32"),
        ("--load /w --enable-hf2mg-convert --model-type-hf glm45-air", "--enable-hf2mg-convert"),
        ("--tokenizer-type MagistralTokenizer", "--tokenizer-type"),
        ("--context-parallel-size 2 --context-parallel-algo adaptive_cp_algo", "--context-parallel-algo"),
        ("--rope-scaling-type yarn", "--rope-scaling-type"),
        ("--sparse-mode 4", "--sparse-mode"),
        (
            "--multi-latent-attention --transformer-impl local --reset-attention-mask",
            "--reset-attention-mask",
        ),
        ("--seq-length 4096 --pre-tockens 128", "--pre-tockens"),
        ("--moe-router-load-balancing-type group_limited_greedy", "--moe-router-load-balancing-type"),
        ("--norm-topk-prob --moe-router-topk-scaling-factor 2", "--norm-topk-prob"),
        ("--spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec", "--spec"),
        ("--num-layers $LAYERS --noop-layers 3", "--noop-layers"),
        ("--num-layers 4 --noop-layers $NOOP", "--noop-layers"),
        ("--num-layers 4 --num-layer-list $LIST2", "--num-layer-list"),
        ("--num-layers 4 --pipeline-num-transformer-layers [[1],[2,1]]", "--pipeline-num-transformer-layers"),
        ("--n-shared-experts 1", "--n-shared-experts"),
        # A variable that only the shell expands is not a known value.
        ("--n-shared-experts $N --moe-ffn-hidden-size 8", "--n-shared-experts"),
        ("--n-shared-experts 1 --moe-ffn-hidden-size $N --ffn-hidden-size 8", "--n-shared-experts"),
        ("--num-layers 4 --first-k-dense-replace $N", "--first-k-dense-replace"),
        ("--num-layers 4 --first-k-dense-replace 1 --moe-layer-freq $N", "--first-k-dense-replace"),
        ("--num-layers 4 --noop-layers $N", "--noop-layers"),
        ("--num-layers 4 --noop-layers 3 --pipeline-model-parallel-size $PP", "--noop-layers"),
        ("--seq-length 4096 --pre-tockens $N", "--pre-tockens"),
        ("--topk-softmax-in-fp32 --moe-router-pre-softmax --bf16", "--topk-softmax-in-fp32"),
    ],
)
def test_what_changes_results_is_refused_and_stays_in_the_command(text, flag):
    found = translated(text)
    assert [each.given.flag for each in found.refused] == [flag]
    assert flag in words(found.flags)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "--qk-rope-head-dim 64 --qk-pos-emb-head-dim 32",
            ("--qk-rope-head-dim 64 means", "--qk-pos-emb-head-dim 32 is given"),
        ),
        ("--n-group 8 --moe-router-num-groups 4", ("--moe-router-num-groups 8", "--moe-router-num-groups 4")),
        ("--router-gating-in-fp32 --moe-router-dtype fp64", ("fp32", "fp64")),
        (
            "--num-layers 3 --num-layer-list 1,2 --pipeline-model-parallel-layout Et|ttL",
            ("--num-layer-list 1,2", "--pipeline-model-parallel-layout Et|ttL"),
        ),
    ],
)
def test_contradictions_are_one_sentence(text, parts):
    (problem,) = translated(text).problems
    assert all(part in problem for part in parts), problem


def test_equal_values_are_no_contradiction():
    assert (
        command("--routed-scaling-factor 2.50 --moe-router-topk-scaling-factor 2.5")
        == "--moe-router-topk-scaling-factor 2.5"
    )


def test_words_are_written_as_a_parser_reads_them_back():
    assert command("--x=-5 --y= --z a -1") == "--x=-5 --y= --z a -1"
    assert [quoted(word) for word in ("a b", "${X} y", "([0]*3)")] == ["'a b'", '"${X} y"', "'([0]*3)'"]


def test_every_outcome_is_counted_once():
    translation = translated(
        "--num-layers 2 --swap-optimizer --use-fused-rmsnorm --fix-router --mine 1 --qk-rope-head-dim 8"
    )
    counts = translation.counts()
    assert counts["flags"] == 6
    assert {
        kind: counts[kind]
        for kind in ("same", "megatron", "unchanged", "not needed", "not served", "unknown")
    } == dict.fromkeys(("same", "megatron", "unchanged", "not needed", "not served", "unknown"), 1)
    assert counts["change results"] == 1


SHARING = "--dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset"


@pytest.mark.parametrize("release", ["0.12.1", "0.16.1", "0.18.2", "0.19.0", None])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--index-topk-freq 4 --index-skip-topk-offset 3", [f"{SHARING} 3"]),
        ("--index-topk-freq 4", ["--dsa-indexer-topk-freq 4", "--dsa-indexer-skip-topk-offset 2"]),
        ("--index-topk-pattern CSCS --index-topk-freq 4", ["--dsa-indexer-topk-pattern CSCS"]),
        ("--index-share-for-mtp-iteration", ["--dsa-indexer-share-for-mtp"]),
        ("--apply-rope-no-in-complex", ["--dsa-indexer-rope-interleaved"]),
        ("--no-use-sparse-c8-indexer", ["--no-dsa-indexer-rotate-activation"]),
    ],
    ids=["GLM-5.2", "offset by default", "pattern", "MTP", "rotary", "rotation"],
)
def test_the_indexers_of_glm(release, theirs, ours):
    text = f"{INDEXER} --enable-mla-absorb {theirs}"
    new = command(text, release)
    assert all(part in new for part in ours), new
    assert ("--dsa-indexer-topk-freq" in new) == ("freq" in ours[0])
    assert not translated(text, release).refused
    assert command(new, release) == new
