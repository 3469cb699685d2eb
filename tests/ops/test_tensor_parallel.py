"""The indexer loss with heads spread over ranks equals the loss of one process that has them all."""

from __future__ import annotations

import pytest
import torch

from tests.ops import oracle
from tests.ops.cases import indexer_inputs

CASE = "tests.ops.tp_cases:loss_and_gradients"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.full), "cpu"])
def test_ranks_equal_one_process(pool, ranks, backend):
    generator = torch.Generator().manual_seed(6)
    # Heads of very different sharpness: a rank that normalised its own sum would be far off.
    sharpness = torch.tensor([4.0, 0.1, 2.0, 0.3, 1.0, 0.2, 3.0, 0.5])[:, None]
    arguments = {
        "index": list(indexer_inputs(2, 33)),
        "query": torch.randn(2, 33, 8, 16, generator=generator) * sharpness,
        "key": torch.randn(2, 33, 16, generator=generator),
        "row_mask": torch.rand(2, 33, generator=generator) < 0.8,
        "backend": backend,
    }
    losses = {}
    for form in ("dense", "sparse", "sum", "backward"):
        (whole,) = pool.run(CASE, 1, form=form, **arguments)
        losses[form] = whole["loss"]
        for part in pool.run(CASE, ranks, form=form, **arguments):
            assert part["loss"] == pytest.approx(whole["loss"], rel=1e-5)
            for grad, expected in zip(part["gradients"], whole["gradients"], strict=True):
                assert oracle.relative_error(grad, expected) < 1e-5
            if form != "dense":
                assert torch.equal(part["indices"], whole["indices"])
    assert losses["sum"] == pytest.approx(losses["sparse"], rel=1e-5)
    assert losses["backward"] == pytest.approx(losses["sparse"], rel=1e-5)
    assert losses["dense"] != pytest.approx(losses["sparse"], rel=1e-2)
