"""Documents in a pack train as the same documents one by one."""

from __future__ import annotations

import gc
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import mindspeed_dsa
from mindspeed_dsa.context_parallel import packs
from mindspeed_dsa.context_parallel.packs import BalancedBlocks, Pack, PackRows
from mindspeed_dsa.features.attention.packs import delivery
from mindspeed_dsa.features.attention.packs.feature import check_packs, reset_at_documents
from mindspeed_dsa.features.dsa import sparse_attention
from mindspeed_dsa.features.dsa.key_exchange import rows
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import IndexInputs, Problem, Rows
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.npu.layout import layout_of_ranges
from mindspeed_dsa.ops.row_ranges import visible_ranges
from mindspeed_dsa.patches import SettingsError
from tests.support.model import assert_same_gradients, put_together

CASES = "tests.features.attention.packs.documents"
BUILDER = "tests.features.attention.context_parallel.dense_model"
DENSE = {
    "use_fused_dsa": False,
    "experimental_attention_variant": None,
    "transformer_impl": "local",
}
FULL = pytest.mark.full
BY_HEAD = {"switches": {"use_dsa_absorb": False}}
FORMS = {
    "absorbed": {},
    "by head": BY_HEAD,
    "one document": {"lengths": (80,), "padding": 0},
    "no longer than topk": {"lengths": (5, 0, 6, 3, 0, 4), "padding": 3},
    "no longer than topk, by head": {"lengths": (5, 0, 6, 3, 0, 4), "padding": 3, **BY_HEAD},
    "loss in backward": {"switches": {"dsa_fuse_kl_in_backward": True}},
    "dense loss": {"overrides": {"dsa_indexer_use_sparse_loss": False}},
    "no loss": {"overrides": {"dsa_indexer_loss_coeff": 0.0}},
    "YaRN": {"overrides": {"rope_type": "yarn"}},
    "DeepSeek's order": {"switches": {"dsa_indexer_rope_first": True}},
    "recomputed": {
        "overrides": {
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "mla_up_proj"],
        }
    },
    "warm-up": {"switches": {"dsa_stage": "warmup"}},
}
QUICK = ("absorbed",)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form in QUICK else [FULL]) for form in FORMS]
)
def test_a_pack_trains_as_its_documents_one_by_one(pool, form):
    (packed,), (alone,) = (
        pool.run(f"{CASES}:one_pass", 1, packed=packed, **FORMS[form]) for packed in (True, False)
    )
    torch.testing.assert_close(packed["losses"], alone["losses"], rtol=1e-5, atol=1e-5)
    assert packed["indexer loss"] == pytest.approx(alone["indexer loss"], rel=1e-5)
    assert (packed["indexer loss"] > 0) == (form != "no loss")
    compared = {name: gradient for name, gradient in alone["gradients"].items() if gradient.any()}
    assert any("indexer" in name for name in compared) == (form != "no loss")
    assert_same_gradients({name: packed["gradients"][name] for name in compared}, compared, 1e-5)


MTP = {"mtp": True, "overrides": {"mtp_num_layers": 1, "num_layers": 2}}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        pytest.param(4, {"tp": 2, "pp": 2}, marks=FULL),
        pytest.param(2, {"pp": 2, "from_tokens": True}, marks=FULL),
        pytest.param(4, {"pp": 4}, marks=FULL),
        pytest.param(2, {"pp": 2, "vpp": 2}, marks=FULL),
        pytest.param(2, {"tp": 2, **BY_HEAD}, marks=FULL),
        pytest.param(2, {"cp": 2}, marks=pytest.mark.full),
        pytest.param(4, {"cp": 4}, marks=FULL),
        pytest.param(4, {"cp": 2, "tp": 2, "from_tokens": True}, marks=FULL),
        pytest.param(4, {"cp": 2, "pp": 2}, marks=FULL),
        pytest.param(2, {"cp": 2, "by_run": True}, marks=FULL),
        pytest.param(2, {"cp": 2, "overrides": {"dsa_indexer_topk": 40}}, marks=FULL),
        pytest.param(2, {"cp": 2, "cut": True}, marks=FULL),
        pytest.param(4, {"cp": 4, "cut": True}, marks=FULL),
        pytest.param(1, MTP, marks=FULL),
        (2, {"cp": 2, **MTP}),
        pytest.param(4, {"cp": 2, "tp": 2, "from_tokens": True, **MTP}, marks=FULL),
    ],
    ids=str,
)
def test_a_script_that_knows_no_packs_trains_on_them_on_every_rank(pool, ranks, layout):
    model = {name: layout[name] for name in ("from_tokens", "overrides", "mtp") if name in layout}
    (alone,) = pool.run(f"{CASES}:scripted_step", 1, alone=True, **model)
    packed = pool.run(f"{CASES}:scripted_step", ranks, **layout)
    for context in range(layout.get("cp", 1)):  # gradients are reduced over context parallel ranks
        # Tensor and pipeline parallel ranks have parts of one gradient.
        copies = [rank for rank in packed if rank["context"] == context]
        assert_same_gradients(put_together(copies), alone["gradients"], 2e-5)


@pytest.mark.parametrize(
    ("attention", "ranks", "layout"),
    [
        ("latent", 2, {"cp": 2}),
        pytest.param("latent", 4, {"cp": 4, "algorithm": "ulysses_cp_algo"}, marks=FULL),
        pytest.param("latent", 4, {"cp": 4, "algorithm": "hybrid_cp_algo", "degree": 2}, marks=FULL),
        pytest.param("latent", 4, {"cp": 2, "tp": 2}, marks=FULL),
        pytest.param("grouped", 2, {"cp": 2, "cut": True}, marks=FULL),
    ],
    ids=str,
)
def test_dense_attention_on_several_ranks_takes_packs(pool, attention, ranks, layout):
    # Grouped heads get documents that the script itself has cut; latent attention cuts them here.
    algorithm, degree = (layout.get(name) for name in ("algorithm", "degree"))
    switches = {
        **DENSE,
        "multi_latent_attention": attention == "latent",
        **({"context_parallel_algo": algorithm} if algorithm else {}),
        **({"ulysses_degree_in_cp": degree} if degree else {}),
    }
    model = {"builder": BUILDER, "config": f"{attention}_config"}
    layout = {name: value for name, value in layout.items() if name not in ("algorithm", "degree")}
    (alone,) = pool.run(f"{CASES}:scripted_step", 1, alone=True, switches=switches, **model)
    packed = pool.run(f"{CASES}:scripted_step", ranks, switches=switches, **model, **layout)
    for context in range(layout["cp"]):
        copies = [rank for rank in packed if rank["context"] == context]
        assert_same_gradients(put_together(copies), alone["gradients"], 2e-5)


SCALED = {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}


@pytest.mark.parametrize(
    ("attention", "overrides"),
    [("latent", {}), pytest.param("grouped", {}, marks=FULL), pytest.param("grouped", SCALED, marks=FULL)],
    ids=str,
)
def test_dense_attention_without_transformer_engine_takes_packs(pool, attention, overrides):
    switches = {**DENSE, "pack_documents": True, "multi_latent_attention": attention == "latent"}
    model = {"builder": BUILDER, "config": f"{attention}_config", "overrides": overrides}
    (packed,), (alone,) = (
        pool.run(f"{CASES}:one_pass", 1, packed=each, switches=switches, **model) for each in (True, False)
    )
    torch.testing.assert_close(packed["losses"], alone["losses"], rtol=1e-5, atol=1e-5)
    assert_same_gradients(packed["gradients"], alone["gradients"], 1e-5)


def params(lengths, padded=None, **more):
    sums = torch.tensor([0, *lengths]).cumsum(0)
    places = None if padded is None else torch.tensor([0, *padded]).cumsum(0)
    fields = {"cu_seqlens_q": sums, "cu_seqlens_q_padded": places}
    return SimpleNamespace(**{"qkv_format": "thd", **fields, **more})


def test_rows_know_their_document():
    pack = Pack.of(params((2, 0, 3), (4, 1, 3), unknown="field"), 10)
    assert pack.documents == ((0, 2), (5, 8))
    assert pack.starts.tolist() == [0, 0, 0, 0, 0, 5, 5, 5, 0, 0]
    assert pack.ends.tolist() == [1, 2, 0, 0, 0, 6, 7, 8, 0, 0]
    assert pack.positions.tolist() == [0, 1, 0, 0, 0, 0, 1, 2, 0, 0]
    assert pack.counted.tolist() == [True, True, False, False, False, True, True, True, False, False]
    assert (pack.tokens, pack.longest) == (5, 3)


def test_megatron_is_told_of_the_same_rows(pool):
    """The padded description covers all rows, because Megatron's rotary embedding cuts the rows at its
    bounds.
    """
    (told,) = pool.run(f"{CASES}:told", 1, all_lengths=[(3,), (0, 3), (2, 0, 1, 0), (), (0,)], padding=2)
    assert len(told) == 10
    for pack, again, place, dtype in told:
        assert again == pack
        assert place == pack.length
        assert dtype == torch.int32


def test_documents_end_with_their_token():
    assert Pack.of_tokens(torch.tensor([[5, 3, 3, 4, 4]]), 3).documents == ((0, 2), (2, 3), (3, 5))
    assert Pack.of_tokens(torch.tensor([4, 3]), 3).documents == ((0, 2),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (params((2, 3), qkv_format="sbhd"), "qkv_format is 'sbhd'"),
        (params((2, 3), local_cp_size=2), "without hybrid context parallelism"),
        (SimpleNamespace(qkv_format="thd"), "no cu_seqlens_q"),
        (params((2, 3), cu_seqlens_kv=torch.tensor([0, 5])), "cu_seqlens_q and cu_seqlens_kv differ"),
        (params((2, 9)), "6 rows cannot hold documents that end at"),
        (params((2, -1)), "never fall"),
        (params((2, 1), (1, 2)), "in places that end at"),
    ],
    ids=str,
)
def test_what_describes_no_pack_is_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Pack.of(given, 6)


def test_lengths_on_a_device_are_read_once(monkeypatch):
    """The host reads lengths once for all layers, and again after they change, in place or not."""
    # On the CPU no read waits for a device, so this is pretended here.
    monkeypatch.setattr(packs, "_host_waits_for", lambda sums: True)
    reads, listed = [], packs._listed
    monkeypatch.setattr(packs, "_listed", lambda sums: reads.append(sums) or listed(sums))
    sums = torch.tensor([0, 2, 5])
    description = params((2, 3), cu_seqlens_q=sums, cu_seqlens_kv=sums)
    group = SimpleNamespace(size=lambda: 1)
    for _ in range(3):
        assert PackRows.of(description, 6, group).pack.documents == ((0, 2), (2, 5))
    assert len(reads) == 1
    # A change in place counts, too.
    sums[1] = 4
    assert PackRows.of(description, 6, group).pack.documents == ((0, 4), (4, 5))
    description.cu_seqlens_q = description.cu_seqlens_kv = torch.tensor([0, 6])
    assert PackRows.of(description, 6, group).pack.documents == ((0, 6),)
    assert len(reads) == 3
    del sums, description
    reads.clear()
    gc.collect()
    assert not packs._read, "what nobody has any more is forgotten"


def test_padding_at_the_end_reaches_no_operator():
    # NPU operators take adjacent documents only, so the padding rows at the end must be cut off.
    pack = Pack.of(params((5, 17, 9)), 39)
    rows = Rows.of_pack(PackRows(pack), torch.device("cpu"))
    heads, size = 2, 4
    operands = Operands(*(torch.randn(39, 1, n, size) for n in (heads, 1)), torch.randn(heads, 3, 2), 1.0)
    index = IndexInputs(torch.randn(1, 39, 1, size), torch.randn(1, 39, size), torch.randn(1, 39, 1))
    seen = []

    def noting(query, key, *args, **kwargs):
        seen.append((query.shape[1], key.shape[1]))
        return lightning_indexer(query, key, *args, **kwargs)

    with mock.patch.object(sparse_attention, "lightning_indexer", noting):
        out = sparse_attention.sparse_attention(Problem(operands, 6, rows), index).out
    # 31 rows belong to documents; 8 more are padding.
    assert seen == [(31, 31)]
    assert out.shape[0] == 39
    assert out[:31].any(dim=-1).all()
    assert not out[31:].any()
    kept = rows.first(31)
    layout = layout_of_ranges(visible_ranges("", 1, 31, 31, kept.starts, kept.ends, torch.device("cpu")), 31)
    assert layout.sequences == (5, 17, 9)


def test_runs_are_neighbours_in_one_document():
    # Blocks of four rows. Ascend's operators get one run at a time.
    pack = Pack.of(params((5, 1, 7)), 16)
    rows = [PackRows(pack, BalancedBlocks(2, pack, 4), rank) for rank in (0, 1)]
    for pack_rows in rows:
        covered = 0
        for first, end, low, high in pack_rows.runs():
            assert first == covered
            covered = end
            run = slice(first, end)
            # Each row of a run sees one key more than the row before; padding sees none.
            seen = range(high - (end - first) + 1, high + 1) if high > low else [0] * (end - first)
            assert pack_rows.ends[run].tolist() == list(seen)
            assert set(pack_rows.starts[run].tolist()) == {low}
        assert covered == 8


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"micro_batch_size": 2}, "--micro-batch-size is 2; use 1"),
        ({"micro_batch_size": 1, "eval_micro_batch_size": 2}, "--eval-micro-batch-size is 2; use 1, or omit"),
        ({"reset_attention_mask": True}, "--reset-attention-mask both say"),
        ({"sft": True}, "the data sets of --sft refuse in|itself delivers the packs of --sft; omit"),
        ({"dataloader_inter_document_masking": True}, "--dataloader-inter-document-masking both say"),
        (
            {
                "context_parallel_size": 2,
                "experimental_attention_variant": None,
                "multi_latent_attention": False,
            },
            "rotates the rows of grouped heads",
        ),
    ],
    ids=str,
)
def test_jobs_that_cannot_pack_are_refused(args, message):
    with mindspeed_dsa.enabled(pack_documents=True), pytest.raises(SettingsError, match=message):
        mindspeed_dsa.validate(SimpleNamespace(**args))


@pytest.mark.parametrize(
    "sizes", [{"eval_micro_batch_size": 1}, {"eval_micro_batch_size": 2, "eval_iters": 0}]
)
def test_jobs_whose_evaluations_pack(sizes):
    assert not check_packs(SimpleNamespace(micro_batch_size=1, **sizes), None)


@pytest.mark.parametrize("switches", [{}, {"use_fused_lightning_indexer": True}], ids=str)
@pytest.mark.parametrize("release", ["0.16.1", "0.18.0"])
def test_dsa_of_megatron_alone_cannot_pack(release, switches):
    args = SimpleNamespace(experimental_attention_variant="dsa", **switches)
    with mock.patch("mindspeed_dsa.patches.versions.of_megatron", return_value=release):
        (problem,) = check_packs(args, None)
        assert f"Megatron-core {release} has no packed sequences for DSA" in problem
        assert not check_packs(SimpleNamespace(**vars(args), dsa_stage="warmup"), None)
        assert not check_packs(
            SimpleNamespace(experimental_attention_variant="dsa", use_fused_dsa=True), None
        )
    for served in ("0.15.3", "0.19.0"):  # by our own DSA, and by Megatron's
        with mock.patch("mindspeed_dsa.patches.versions.of_megatron", return_value=served):
            assert not check_packs(args, None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_does_not_cut_documents_that_are_dealt_out(ranks):
    state = SimpleNamespace(get_context_parallel_world_size=lambda: ranks)
    step = delivery.Step(SimpleNamespace())
    context = SimpleNamespace(megatron=lambda name: state, state=lambda factory: step)
    forward = delivery.with_pack(
        lambda model, tokens=None, packed_seq_params=None: packed_seq_params, context
    )
    dealt, cut = SimpleNamespace(dealt_block_rows=128), SimpleNamespace(qkv_format="thd")
    assert forward(None, packed_seq_params=cut) is cut  # without packing, the script's own cut is kept
    # As if a microbatch were running with a pack that was dealt out.
    step.running = delivery._Running(Pack(((0, 8),), 8), dealt)
    assert forward(None) is dealt
    assert forward(None, packed_seq_params=dealt) is dealt
    if ranks == 1:
        assert forward(None, packed_seq_params=cut) is cut
        return
    with pytest.raises(ValueError, match="pass none, or omit --pack-documents"):
        forward(None, packed_seq_params=cut)
    with pytest.raises(ValueError, match="no rows were dealt out to the 2"):
        forward(None, torch.zeros(1, 4))
    step.running.is_dealt = True
    assert forward(None, torch.zeros(1, 4)) is dealt


def test_the_data_loader_resets_at_documents():
    args = SimpleNamespace(
        reset_position_ids=False, eod_mask_loss=False, create_attention_mask_in_dataloader=True
    )
    assert len(reset_at_documents(args)) == 3
    assert (args.reset_position_ids, args.eod_mask_loss) == (True, True)
    assert args.create_attention_mask_in_dataloader is False
    assert reset_at_documents(args) == []


@pytest.mark.parametrize("wrap", ["packs", "blocks"])
def test_the_sum_that_divides_a_prediction_loss_is_not_0_where_all_rows_are_masked(monkeypatch, wrap):
    """Megatron 0.16 divides the masked loss by it."""
    context = SimpleNamespace(megatron=lambda name: None)
    masked = torch.zeros(1, 4)
    if wrap == "packs":
        monkeypatch.setattr(delivery.PackRows, "of", lambda *_: SimpleNamespace(next_rows=lambda *_: masked))
        result, total = delivery.roll_in_documents(None, context)(
            masked, cp_group=object(), packed_seq_params=object()
        )
    else:
        monkeypatch.setattr(rows, "_layout", lambda *_: None)
        monkeypatch.setattr(rows, "rolled", lambda *_: masked)
        result, total = rows.roll_rows(None, context)(masked, cp_group=object())
    assert result is masked
    assert total == 1
