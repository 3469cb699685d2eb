"""Every flag of every feature, once, through the job's command line and through Megatron-LM's parser.

Declared flags are typed as a user would, up to the point where a model would be built. Each passes, or is
refused in one message that names the flag and a remedy.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dsa import features, settings
from mindspeed_dsa.feature import Flag
from tests.examples.every_flag import spellings
from tests.support import warm

from .conftest import ROOT, TINY

DENSE = "--experimental-attention-variant none"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
CP = "--context-parallel-size 2"
EP = "--expert-model-parallel-size 2"
WIDE = "--global-batch-size 4"
PP = "--pipeline-model-parallel-size 2"
BALANCED = f"--balanced-moe-experts --num-experts 8 {EP}"
HALVES = "--moe-batch-overlap --moe-batch-overlap-always --moe-batch-overlap-attention"
MEASURED = "--no-deterministic-mode"
SWAP = "--swap-attention --swap-modules self_attention"
RECOMPUTE = "--recompute-granularity selective"

USED = {
    "a checkpoint folder": (1, "--save {folder}/checkpoints"),
    "norms in fp32": (1, "--bf16 --init-norm-weight-in-fp32"),
    "balanced experts": (2, f"{BALANCED} --balanced-moe-hot-expert-num 2 {MEASURED}"),
    "balanced experts, rates": (2, f"{BALANCED} --balanced-moe-matmul-rate 1 --balanced-moe-link-rate 1"),
    "batch overlap": (
        2,
        f"{HALVES} --micro-batch-size 2 {WIDE} {EP}",
    ),
    "compiled regions": (1, "--compile-regions"),
    "context parallel": (2, f"{CP} --cp-comm-type allgather"),
    "context parallel, by name": (2, f"{CP} --context-parallel-algo kvallgather_cp_algo"),
    "context parallel, dense": (
        2,
        f"{DENSE} {CP} --context-parallel-algo ulysses_cp_algo",
    ),
    "context parallel, vocabulary": (2, f"{CP} --cp-shard-vocabulary --fused-linear-cross-entropy"),
    "coc": (2, f"--use-ascend-coc {TP} --coc-parallel-num 2 --no-coc-recompute-all-gather"),
    "coc, gathered again": (2, f"--use-ascend-coc {TP} --coc-recompute-all-gather {MEASURED}"),
    "experts overlap": (2, f"--moe-alltoall-overlap-comm {EP}"),
    "forward beside backward": (2, f"--moe-fb-overlap {EP}"),
    "first pipeline rank": (2, f"--decoder-first-pipeline-num-layers 1 --num-layers 3 {PP}"),
    "last pipeline rank": (2, f"--decoder-last-pipeline-num-layers 1 --num-layers 3 {PP}"),
    "FSDP2": (2, "--use-torch-fsdp2 --fsdp2-prefetch 2 --fsdp2-reduce-dtype bf16 --fsdp2-sharding-size 2"),
    "FSDP2, experts": (2, "--use-torch-fsdp2 --fsdp2-shard-experts"),
    "indexers that serve": (1, "--dsa-indexer-loss-layers served --dsa-indexer-topk-freq 2"),
    "repairs left out": (1, "--no-dsa-repairs loss-tracker,loss-gate"),
    "selections recorded": (
        1,
        (
            "--dsa-record-selections {folder}/selections --dsa-record-selections-steps 1-10 "
            "--dsa-record-selections-layers 1 --dsa-record-selections-rows 0- --dsa-record-selections-mass"
        ),
    ),
    "selections replayed": (1, "--dsa-replay-selections batch --dsa-replay-missing select"),
    "split backward": (2, f"--split-backward --split-backward-waiting 1 {PP}"),
    "split backward, by Megatron's name": (2, f"--delay-wgrad-compute {PP}"),
    "DualPipeV": (
        2,
        f"--schedules-method dualpipev --dualpipev-dw-detach {PP} --num-layers 4 --global-batch-size 8",
    ),
    "DualPipeV in pairs": (
        4,
        (
            f"--schedules-method dualpipev --moe-fb-overlap --overlap-moe-expert-parallel-comm {EP} {PP} "
            "--delay-wgrad-compute --bf16 --num-layers 4 --global-batch-size 8"
        ),
    ),
    "indexer": (1, "--dsa-indexer-head-dim 16 --dsa-backend cpu"),
    "indexer's rotary": (1, "--dsa-indexer-rope-first --dsa-indexer-rope-interleaved"),
    "indexers of some layers": (1, "--dsa-indexer-topk-pattern CS"),
    "indexer of a known model": (1, "--dsa-model glm-5"),
    "weights saved": (1, "--save {folder}/trained --save-hf {folder}/models --dsa-model deepseek-v3.2"),
    "mla-sp-tp-sp": (2, f"--mla-sp-tp-sp {DENSE} {TP}"),
    "mla-sp-tp-sp, context parallel": (4, f"--mla-sp-tp-sp {DENSE} {TP} {CP}"),
    "record of collectives": (1, "--record-collectives {folder}/calls --record-collectives-after 60"),
    "recompute norms, compared": (1, "--recompute-norm --recompute-verify"),
    "recompute norms": (1, "--recompute-norm --recompute-norm-num-layers 1"),
    "recompute activations": (
        1,
        "--recompute-activation-function --recompute-activation-function-num-layers 1",
    ),
    "recompute in bubbles": (2, f"--recompute-in-bubble {RECOMPUTE} --recompute-modules core_attn {PP}"),
    "recompute in advance": (2, f"--recompute-in-advance {RECOMPUTE} --recompute-modules core_attn {PP}"),
    "recompute modules": (1, f"{RECOMPUTE} --recompute-modules moe_act --moe-grouped-gemm"),
    "reuse": (1, "--reuse-fp32-param --bf16"),
    "swapped attention": (1, f"{SWAP} --swap-attention-num-layers 1 --swap-attention-min-bytes 1"),
    "swapped attention, bounded": (1, f"{SWAP} --swap-attention-bytes 100000000"),
    "stretched rotary embeddings": (
        1,
        "--rope-type yarn --yarn-beta-fast 16 --yarn-beta-slow 2 --yarn-original-max-position-embeddings 64",
    ),
    "swapped optimizer": (1, "--swap-optimizer --swap-optimizer-times 4"),
    "trace": (1, "--trace-schedule {folder}/trace --trace-schedule-step 2 --train-iters 9"),
    "variant": (1, "--experimental-attention-variant dsa --transformer-impl local"),
    "virtual optimizer": (1, "--virtual-optimizer all"),
}
"""Flags that need other flags or several ranks: the number of ranks, and the command line."""

NOT_OF_THIS_JOB = {
    *("--dsa-kernel-backend", "--multi-latent-attention", "--use-flash-attn"),
    *("--sft-tokenizer-prompt-format", "--eval-micro-batch-size"),
    *("--hybrid-layer-pattern", "--hybrid-override-pattern"),
}
NOT_HERE = {
    *("--mindspeed-platform", "--use-ascend-mc2", "--coc-fused-kernel"),  # devices
    *("--load", "--load-hf", "--moe-expert-placement", "--fsdp2-config-path"),  # files
    "--dsa-search-selections",  # a file of the command that sets it
    *("--step-metrics-file", "--sft-mask-prompts"),  # of Megatron-LM's own loop
}
WHO = {
    "--overlap-moe-expert-parallel-comm": "overlap_moe_expert_parallel_comm",
    "--coc-parallel-num": "--use-ascend-coc",
    "--coc-fused-kernel": "--use-ascend-coc",
    "--context-parallel-size": "context parallel",
    "--load": "checkpoint",
    "--mindspeed-platform": "platform",
    "--tensor-model-parallel-size": "tensor parallel",
}
"""Subjects of messages in which the flag itself does not occur."""
REMEDY = re.compile(
    r"\b(add|check|choose|complete ones|did you mean|drop|give|install|lower|make|name|omit|set|start|switch"
    r"|train|unset|use|write)\b"
)


def flags() -> list[Flag]:
    """Return every declared flag."""
    declared = [flag for feature in features.shipped() for flag in feature.flags]
    return settings.unique([settings.PLATFORM, settings.MEGATRON_ROOT, settings.REPORT_DIR, *declared])


def ask(job: str, cases: Sequence[tuple[list[str], int]], **environ: str) -> list[Any]:
    """Return ``[status, text]`` of each case."""
    command = [sys.executable, "-m", "tests.examples.every_flag", job]
    paths = (environ.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH"))
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = warm.run(
        command,
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environ},
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def unclear(name: str, status: int | str, text: str) -> str:
    """Return a description of a wrong answer to one flag, or an empty string."""
    if status == 0:
        return ""
    if status != 2:
        return f"{name}: {status}\n{text}"
    clear = "Traceback" not in text and WHO.get(name, name) in text and REMEDY.search(text)
    return "" if clear else f"{name} is refused with:\n{text}"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """Return the example job's answers to single flags, and to the sets of :data:`USED`."""
    folder = tmp_path_factory.mktemp("flags")
    job = [*TINY, "--data", str(text_folder), "--output-dir", str(folder / "run"), "--new-run"]
    alone = [words for flag in flags() for words in spellings(flag, folder)]
    together = [(words.format(folder=folder).split(), world) for world, words in USED.values()]
    cases = [*((words, 1) for words in alone), *together]
    found = ask("example", [([*job, *words], world) for words, world in cases])
    each = zip(alone, found[: len(alone)], strict=True)
    return [(words[0], *answer) for words, answer in each], dict(zip(USED, found[len(alone) :], strict=True))


def test_every_flag_passes_or_is_refused_in_one_message(answers: Any) -> None:
    alone, _ = answers
    problems = [unclear(*answer) for answer in alone]
    assert not any(problems), "\n\n".join(filter(None, problems))
    unknown = {name for name, _, text in alone if "is no flag of this job" in text}
    assert unknown == NOT_OF_THIS_JOB
    usable = [status for name, status, _ in alone if name not in NOT_OF_THIS_JOB | NOT_HERE]
    assert sum(status == 0 for status in usable) > len(usable) // 2


@pytest.mark.parametrize("name", USED)
def test_flags_can_be_used_together(answers: Any, name: str) -> None:
    status, text = answers[1][name]
    assert status == 0, text


def test_every_flag_that_is_refused_alone_can_be_used(answers: Any) -> None:
    """Otherwise the job could list a flag that is of no use in it."""
    alone, _ = answers
    used = {word for _, words in USED.values() for word in words.split()}
    assert {name for name, status, _ in alone if status == 2} - used == NOT_OF_THIS_JOB | NOT_HERE


GPT = """
--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --seq-length 32
--max-position-embeddings 32 --transformer-impl local --position-embedding-type rope --no-rope-fusion
--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8
--v-head-dim 8 --experimental-attention-variant dsa --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 8
--dsa-indexer-topk 8 --dsa-indexer-loss-coeff 0.01 --num-experts 2 --moe-ffn-hidden-size 16
--moe-router-topk 1 --moe-shared-expert-intermediate-size 16 --moe-token-dispatcher-type alltoall
--distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --micro-batch-size 1 --global-batch-size 2
--train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255
""".split()


@pytest.mark.full
@pytest.mark.timeout(1600)
@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_every_flag_through_megatron_lms_own_parser(tmp_path: Path) -> None:
    """Megatron's own assertions are allowed for its own flags."""
    alone = [words for flag in flags() for words in spellings(flag, tmp_path)]
    megatron = {flag.name for flag in flags() if flag.megatron}
    checkout = os.environ["MEGATRON_LM"].split(os.pathsep)[0]
    environ = {"PYTHONPATH": checkout, "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    answers = ask("pretrain_gpt", [([*GPT, *words], 1) for words in alone], **environ)
    problems = [
        unclear(words[0], status, text)
        for words, (status, text) in zip(alone, answers, strict=True)
        if not (words[0] in megatron and str(status).startswith("AssertionError"))
    ]
    assert not any(problems), "\n\n".join(filter(None, problems))
    assert sum(status == 0 for status, _ in answers) > len(answers) // 2
