"""LoRA of mcore-bridge (ms-swift) and of Megatron-Bridge, against PEFT on transformers' own model.

The same weights and adapters, in fp32: losses, and the gradients of both matrices of every adapter.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.hosts.frameworks.adapter_job import INDEXER, NAMES, part
from tests.hosts.frameworks.test_frameworks import ended_on_ranks, needs

ABSORBED = {"use_fused_dsa": True, "use_dsa_absorb": True}
BY_HEAD = {"use_fused_dsa": True, "use_dsa_absorb": False}
ATTENTION = [name for name in NAMES.values() if name not in INDEXER]
ALL = [*ATTENTION, *INDEXER]
SPLIT = {
    # It splits adapters of replicated layers over ranks, which then mix tokens of their own.
    "megatron-bridge": ["linear_q_up_proj", "linear_kv_up_proj", *INDEXER],
    # Before Megatron-core 0.17 it takes replicated layers for split ones.
    "mcore-bridge": ["linear_q_up_proj", "linear_kv_up_proj", "linear_proj"],
}
"""Layers that each package can adapt on two tensor parallel ranks with sequence parallelism."""


def run(package, folder, ranks=1, **asked):
    """Run the job, and return each rank's result."""
    ended_on_ranks(ranks, "adapter_job.py", package, str(folder), json.dumps(asked))
    return [torch.load(folder / f"{package}-{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module", params=[0.0, 0.5], ids=["frozen indexers", "adapted indexers"])
def reference(request, tmp_path_factory):
    """Return the folder, the loss coefficient, and the result of transformers with PEFT."""
    pytest.importorskip("peft")
    folder, coefficient = tmp_path_factory.mktemp("model"), request.param
    targets = ALL if coefficient else ATTENTION
    (result,) = run("transformers", folder, coefficient=coefficient, targets=targets)
    return folder, coefficient, result


@pytest.mark.parametrize(
    ("package", "ranks", "switches"),
    [
        pytest.param("mcore-bridge", 1, ABSORBED, marks=needs("mcore-bridge"), id="mcore-bridge"),
        pytest.param("mcore-bridge", 1, BY_HEAD, marks=needs("mcore-bridge"), id="mcore-bridge by head"),
        pytest.param(
            "mcore-bridge", 2, ABSORBED, marks=needs("mcore-bridge"), id="mcore-bridge on two ranks"
        ),
        pytest.param("megatron-bridge", 1, ABSORBED, marks=needs("megatron-bridge"), id="Megatron-Bridge"),
        pytest.param(
            "megatron-bridge", 2, ABSORBED, marks=needs("megatron-bridge"), id="Megatron-Bridge on two ranks"
        ),
    ],
)
def test_adapters_train_as_with_peft_on_transformers(tmp_path, reference, package, ranks, switches):
    folder, coefficient, theirs = reference
    targets = ALL if coefficient else ATTENTION
    if ranks > 1:
        folder, targets = tmp_path, [name for name in SPLIT[package] if name in targets]
        (theirs,) = run("transformers", folder, coefficient=coefficient, targets=targets)
    found = run(package, folder, ranks, switches=switches, coefficient=coefficient, targets=targets)
    for rank, ours in enumerate(found):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for place, matrices in theirs["gradients"].items():
            for name, own, whole in zip("AB", ours["gradients"][place], matrices, strict=True):
                difference = (own - part(whole, own, rank)).abs().max()
                assert difference <= 1e-5 * whole.abs().max(), (place, name)
