"""TorchTitan's own trainer on NPU tensors, stock and with all converters, compared with CPU tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan.config.override", reason="TorchTitan 0.3, for torch 2.13: make test-npu")

from tests.hosts.torchtitan import jobs
from tests.npu import titan_jobs
from tests.npu.device import launch

STEPS = 2
# Widths that the operators take.
WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 16}
CONVERTERS = ["npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm"]
SPARSE = {"names": CONVERTERS, "topk": 16, "index_heads": 8, "index_dim": 128}
# All keys of a row are selected, as without a selection.
ALL_KEYS = {**SPARSE, "topk": 64}
JOBS = {"stock": None, "all keys": ALL_KEYS, "sparse": SPARSE}
CALLED = {"deepseek_sparse_attention", "rms_norm", "permute", "unpermute", "grouped_matmul"}
# Attention to fewer than 1024 keys is PyTorch's, in chunks.
OPERATORS = {"lightning_indexer npu", "sparse_flash_attention chunked", "rms_norm npu"}
LAYOUTS = {
    "one rank": (1, []),
    "FSDP": (2, [*jobs.BACKEND]),
    "EP": (2, [*jobs.BACKEND, "--parallelism.expert_parallel_degree", "2"]),
    # Without TP: stock, too, fails in torch_npu's product of distributed tensors, whose parts do not fit.
    "PP": (2, [*jobs.BACKEND, "--parallelism.pipeline_parallel_degree", "2"]),
}
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """Return a folder with tokenizer, texts and initial weights of all jobs, and the jobs of one CPU rank."""
    folder = jobs.files(tmp_path_factory.mktemp("torchtitan"))
    seed = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--dump_folder", "seed"]
    return folder, train("cpu", "one rank", folder, before=[["seed", SPARSE, seed]])


def run(platform: str, ranks: int, folder: Path, given: list[Any]) -> Found:
    """Run jobs; return the output of the rank that has the losses, by job."""
    done = launch.run(
        Path(titan_jobs.__file__),
        [platform, json.dumps(given)],
        ranks=ranks,
        variables={"TITAN_WIDTHS": json.dumps(WIDTHS), "HF_HUB_OFFLINE": "1"},
        limit=600,
        stand_in=platform == "npu",
        folder=folder,
    ).require_success()
    lines = done.output[-1].splitlines()
    return dict(
        json.loads(line.removeprefix(titan_jobs.MARK)) for line in lines if line.startswith(titan_jobs.MARK)
    )


def train(platform: str, layout: str, folder: Path, before: Sequence[Any] = ()) -> Found:
    """Train from the same weights, after other jobs; on several ranks only with converters."""
    ranks, arguments = LAYOUTS[layout]
    job_list = [*before]
    for name, converters in JOBS.items():
        if ranks > 1 and name != "sparse":
            continue
        options = ["--dump_folder", f"{platform} {layout} {name}", "--checkpoint.enable"]
        options += [
            "--checkpoint.initial_load_path",
            f"{folder}/seed/checkpoint/step-0",
            "--checkpoint.load_only",
        ]
        options += ["--training.mixed_precision_param", "bfloat16", "--training.steps", str(STEPS)]
        job_list.append([name, converters, [*options, *arguments]])
    return run(platform, ranks, folder, job_list)


def require_as(found: Any, expected: Any, loss: float = 2e-3, norm: float = 2e-2) -> None:
    """Compare steps, losses and norms of gradients."""
    assert [step for step, _, _ in found["steps"]] == list(range(1, STEPS + 1))
    for (_, *got), (_, *wanted) in zip(found["steps"], expected["steps"], strict=True):
        assert got[0] == pytest.approx(wanted[0], rel=loss)
        assert got[1] == pytest.approx(wanted[1], rel=norm)


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.full] if n else []) for n, name in enumerate(LAYOUTS)]
)
def test_losses_are_those_of_cpus(layout: str, begun: tuple[Path, Found]) -> None:
    folder, alone = begun
    expected = alone if layout == "one rank" else train("cpu", layout, folder)
    results = train("npu", layout, folder)
    assert results
    for name, result in results.items():
        require_as(result, expected[name])
    assert set(results["sparse"]["calls"]) >= CALLED | OPERATORS
    if layout == "one rank":
        require_as(results["all keys"], results["stock"])
        assert results["sparse"]["steps"][0][1] != pytest.approx(results["stock"]["steps"][0][1], rel=1e-6)
        assert results["stock"]["calls"] == []
