"""Cases of ``test_features_on_device.py`` and ``test_layouts_on_device.py``: features that serve NPUs.

Initial weights and data are the same on both platforms, so losses and norms differ only by the order of sums
and by 16-bit rounding. One job per platform runs all cases of a precision and a number of ranks, so each test
file stays in one of pytest's processes.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.npu import device_jobs, kernels
from tests.npu.device import launch

TP = "--tensor-model-parallel-size 2 --sequence-parallel"
EP = "--expert-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"
CP = "--context-parallel-size 2"
GROUPED = "--moe-grouped-gemm --moe-permute-fusion"
DENSE = "--experimental-attention-variant none"
WIDE = "--global-batch-size 4"
SHARDED = "--use-distributed-optimizer"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"

CASES: dict[int, dict[str, str]] = {
    1: {
        "fused dsa": "",
        "not absorbed": "--use-dsa-absorb off",
        "fewer keys than operators take": "--dsa-indexer-topk 16",
        "dense attention": DENSE,
        "dense attention in parts": f"{DENSE} --qk-head-dim 64 --v-head-dim 64",
        "digests of weights": "--initial-weights-dir {folder}/digests",
        "fused operators": "--fused-operators all",
        "grouped experts": GROUPED,
        "linear cross entropy": "--fused-linear-cross-entropy",
        "prediction": "--mtp-num-layers 1",
        "prediction recomputed": "--mtp-num-layers 1 --mtp-recompute",
        "indexers' warm-up": "--dsa-stage warmup",
        "two streams": "--two-streams",
        "schedule trace": "--trace-schedule {folder}/trace --trace-schedule-step 2",
        "calls recorded": "--record-collectives {folder}/calls",
        "packs": "--pack-documents",
        "full recompute": RECOMPUTED,
        "recompute modules": f"{SELECTIVE} --recompute-modules moe_act --moe-grouped-gemm",
        "recompute norms": "--recompute-norm",
        "recompute activations": "--recompute-activation-function",
        "swapped attention": "--swap-attention --swap-modules self_attention --swap-attention-min-bytes 1",
        "swapped optimizer": f"--swap-optimizer {SHARDED}",
        "virtual optimizer": "--virtual-optimizer all",
        "reused weights": f"--reuse-fp32-param {SHARDED}",
        "norms in fp32": "--init-norm-weight-in-fp32",
        "indexers of some layers": "--dsa-indexer-topk-pattern CS --dsa-indexer-topk 16",
        "selections recorded": (
            "--dsa-record-selections {folder}/selections --dsa-record-selections-steps 1-2"
        ),
        "stretched rotary embeddings": "--rope-type yarn --yarn-original-max-position-embeddings 64",
    },
    2: {
        "TP2": TP,
        "CP2": CP,
        "EP2": f"{EP} {GROUPED}",
        "PP2": PP,
        "DP2": SHARDED,
        "FSDP2": "--use-torch-fsdp2 --fsdp2-shard-experts",
        "CoC": f"--use-ascend-coc --coc-parallel-num 2 {TP}",
        "MC2": f"--use-ascend-mc2 --hidden-size 256 {TP}",
        "padded sequences": f"{CP} --seq-length 30",
        "divided vocabulary": f"--cp-shard-vocabulary --fused-linear-cross-entropy {CP}",
        "blocks of rows": f"--cp-block-rows 4 {CP}",
        "transfers of experts behind products": f"--moe-alltoall-overlap-comm {EP}",
        "pairs": f"--moe-fb-overlap {EP} {WIDE}",
        "halves": f"--moe-batch-overlap --moe-batch-overlap-always --micro-batch-size 2 {EP} {WIDE}",
        "balanced experts": f"--balanced-moe-experts --balanced-moe-hot-expert-num 1 {EP}",
        "experts of tensor ranks": f"--moe-tp-extend-ep {TP}",
        "dense CP2": f"{DENSE} {CP} --context-parallel-algo ulysses_cp_algo",
        "SP-TP-SP": f"--mla-sp-tp-sp {DENSE} {TP} --seq-length 1024",  # in two pieces of rows
        "split backward": f"--split-backward {PP}",
        "recompute in bubbles": f"--recompute-in-bubble {SELECTIVE} --recompute-modules core_attn {PP}",
        "DualPipeV": f"--schedules-method dualpipev --num-layers 4 {PP} {WIDE}",
    },
}
"""Flags by number of ranks and name."""
ELSEWHERE = {
    "moe-router-load-report": "test_pretrain_gpt.py",
    "moe-expert-placement": "test_pretrain_gpt.py",
    "step-metrics": "test_pretrain_gpt.py",
    "whole-checkpoints": "test_pretrain_gpt.py",
    "load-hf": "test_pretrain_gpt.py",
    "save-hf": "test_pretrain_gpt.py",
    "dsa-selection-search": "evaluates layers in place of training steps, so it has no losses of steps",
    "sft-prompts": "changes what a tokenizer returns, which no device sees",
    "accept-mindspeed-flags": "changes the command line",
    "flash-attention": "calls the operator of dense-context-parallel, for layers without latent attention",
    "compile-regions": "the stand-in is a mode of dispatch, beside which torch compiles nothing",
}
"""Features without a case here: the test that trains with them, or the reason why none can."""
LONG = (
    "fewer keys than operators take",
    "dense attention in parts",
    "prediction recomputed",
    "schedule trace",
    "calls recorded",
    "recompute modules",
    "recompute norms",
    "norms in fp32",
    "indexers of some layers",
    "digests of weights",
)
"""Cases of one rank that only the long tests run; fp32 is long, too."""
QUICK = {
    1: tuple(name for name in CASES[1] if name not in LONG),
    2: ("TP2", "CP2", "EP2", "PP2", "DP2", "pairs"),
}
"""Cases of the quick tests, in bf16."""
BOUNDS = {"bf16": (2e-3, 2e-2), "fp32": (2e-5, 5e-4)}
"""Largest relative difference of a loss and a gradient norm from the CPU platform's."""
LIMIT = 1200
"""Seconds for all cases on one platform, for which the first test of a group waits."""


def complete(flags: str, precision: str) -> str:
    """Return a case's flags with its precision's and, for sparse attention, the fused operators' flags."""
    absorbed = "" if "--use-dsa-absorb" in flags or DENSE in flags else "--use-dsa-absorb on"
    fused = "" if DENSE in flags else "--use-fused-dsa"
    return " ".join((*(["--bf16"] if precision == "bf16" else []), fused, absorbed, flags))


def is_quick(ranks: int, precision: str, name: str) -> bool:
    """Return whether a case is one of the quick tests."""
    return precision == "bf16" and name in QUICK[ranks]


@functools.cache
def results(
    platform: str, ranks: int, precision: str, quick: bool, folder: Path
) -> list[dict[str, dict[str, Any]]]:
    """Return results of each rank by case, for the quick cases or for the others."""
    case_folder = folder / f"{platform}-{precision}-{ranks}-{quick}"
    case_folder.mkdir()
    cases = []
    for name, flags in CASES[ranks].items():
        if is_quick(ranks, precision, name) != quick:
            continue
        case_flags = flags.replace("{folder}", str(case_folder))
        if platform == "cpu":  # the CPU has no operator that also communicates
            case_flags = case_flags.replace("--use-ascend-mc2", "")
        if precision == "fp32" and "--reuse-fp32-param" in flags:
            continue
        cases.append([name, complete(case_flags, precision)])
    done = launch.run(
        Path(device_jobs.__file__),
        [platform, json.dumps(cases)],
        ranks=ranks,
        limit=LIMIT,
        stand_in=platform == "npu",
    )
    results_by_rank = []
    for output in done.output:
        rows = [
            line[len(device_jobs.MARK) :] for line in output.splitlines() if line.startswith(device_jobs.MARK)
        ]
        results_by_rank.append(dict(json.loads(row) for row in rows))
    if done.codes != (0,) * ranks:
        results_by_rank.append({"": {"error": "\n".join(text[-3000:] for text in done.output)}})
    return results_by_rank


def rows(ranks: int) -> list[Any]:
    """Return one parameter row for each case and precision."""
    return [
        pytest.param(precision, name, marks=[] if is_quick(ranks, precision, name) else [pytest.mark.full])
        for precision in BOUNDS
        for name in CASES[ranks]
        if not (name == "FSDP2" and not kernels.torch_npu_is("2.10"))  # nor is torch
        and not (precision == "fp32" and name in ("reused weights", "norms in fp32"))
    ]


def require_as_on_a_cpu(ranks: int, precision: str, name: str, folder: Path) -> None:
    """Compare losses and norms of a case on both platforms, on each rank."""
    quick = is_quick(ranks, precision, name)
    actual = results("npu", ranks, precision, quick, folder)
    expected = results("cpu", ranks, precision, quick, folder)
    for on_npu, on_cpu in zip(actual, expected, strict=True):
        assert name in on_npu, on_npu.get("", "a case before it ended the job")
        got, wanted = on_npu[name], on_cpu[name]
        assert "error" not in got, got["error"]
        assert "error" not in wanted, wanted["error"]
        for key, bound in zip(("lm_loss", "grad_norm"), BOUNDS[precision], strict=True):
            assert len(got[key]) == device_jobs.STEPS
            assert got[key] == pytest.approx(wanted[key], rel=bound), key
