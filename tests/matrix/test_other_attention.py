"""Dense attention, and packs of documents, match one process on the installed release."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version

from mindspeed_dsa.patches import versions
from tests.features.attention.context_parallel import dense_model as dense
from tests.matrix.record import Note
from tests.matrix.test_features import DENSE, STEPS
from tests.support.model import assert_same_gradients, put_together

pytestmark = pytest.mark.releases(">=0.12.1")


def dense_ranks(
    pool: Any, case: dict[str, Any], alone: dict[str, Any], cp: int, tp: int
) -> list[dict[str, Any]]:
    """Run a dense model on several ranks, and compare it with one rank."""
    ranks = [rank["found"] | rank for rank in pool.run(f"{STEPS}:beside", 2, **case)]
    merged = dense.in_one_group(ranks, cp, tp)
    torch.testing.assert_close(merged["losses"], alone["losses"], rtol=1e-5, atol=0)
    assert_same_gradients(merged["gradients"], alone["gradients"], rtol=1e-5)
    return ranks


@pytest.mark.parametrize(
    ("attention", "algorithm"), [("grouped", "ulysses_cp_algo"), ("latent", "megatron_cp_algo")]
)
def test_dense_attention_on_context_parallel_ranks(
    pool: Any, note: Note, attention: str, algorithm: str
) -> None:
    note.begins(f"CP2, {algorithm}", "dense-context-parallel")
    (alone,) = pool.baseline(f"{DENSE}:step", 1, attention=attention)
    case = {"case": f"{DENSE}:step", "attention": attention, "cp": 2, "algorithm": algorithm}
    ranks = dense_ranks(pool, case, alone, cp=2, tp=1)
    assert all(rank["calls"] > 0 for rank in ranks)
    note.trained(ranks)


def test_dense_attention_by_the_operator(pool: Any, note: Note) -> None:
    note.begins("TP2+SP", "flash-attention")
    (alone,) = pool.baseline(f"{DENSE}:step", 1, attention="grouped")
    case = {"case": f"{DENSE}:step", "attention": "grouped", "tp": 2, "more": {"use_flash_attn": True}}
    ranks = dense_ranks(pool, case, alone, cp=1, tp=2)
    assert all(rank["calls"] > 0 for rank in ranks)
    note.trained(ranks)


def test_latent_attention_by_rows_and_heads(pool: Any, note: Note) -> None:
    note.begins("TP2+SP", "mla-sp-tp-sp")
    (alone,) = pool.baseline(f"{DENSE}:step", 1, attention="latent")
    case = {"case": "tests.features.attention.sp_tp_sp.rows_and_heads:facts", "tp": 2}
    ranks = dense_ranks(pool, case, alone, cp=1, tp=2)
    assert all(rank["received"] == [(dense.SEQUENCE, 2, 8 * 8 // 2)] * 4 for rank in ranks)
    note.trained(ranks)


def test_packs_of_documents(pool: Any, note: Note) -> None:
    """The script knows no packs; the reference runs the same documents one by one."""
    note.begins("TP2+SP x PP2", "pack-documents")
    case = {
        "case": "tests.features.attention.packs.documents:scripted_step",
        "builder": "tests.matrix.model",
        "overrides": {"moe_layer_freq": [0, 1, 0, 1], "dsa_indexer_n_heads": 16},
        # From 0.19 on Megatron's own code describes the rows, and a script passes no lengths.
        "from_tokens": Version(str(versions.of_megatron())) >= Version("0.19"),
    }
    (alone,) = pool.run(f"{STEPS}:beside", 1, alone=True, **case)
    ranks = pool.run(f"{STEPS}:beside", 4, tp=2, pp=2, **case)
    assert_same_gradients(put_together([rank["found"] for rank in ranks]), alone["found"]["gradients"], 2e-5)
    note.trained(ranks)
