"""Settings of sequence padding: when it is on, refused jobs, padded batches and packs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mindspeed_dsa
from mindspeed_dsa.context_parallel.layout import counted_rows
from mindspeed_dsa.context_parallel.packs import BalancedBlocks, Pack
from mindspeed_dsa.context_parallel.padding import Padding, padded_length
from mindspeed_dsa.features.attention.padding import batches
from mindspeed_dsa.features.attention.padding.batches import pad
from mindspeed_dsa.features.attention.padding.feature import FEATURE, Options, check_padding
from mindspeed_dsa.features.moe.load_report import steps
from mindspeed_dsa.features.moe.load_report.feature import Options as LoadOptions
from mindspeed_dsa.patches import versions
from mindspeed_dsa.session import current

SIZES = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("tokens", "ranks", "parts", "block_rows", "length"),
    [
        (32, 1, 1, 0, 32),
        (31, 1, 1, 0, 31),  # one rank divides any length
        (31, 1, 2, 0, 32),
        (29, 2, 1, 0, 32),
        (30, 2, 4, 0, 32),
        (33, 2, 4, 0, 40),
        (29, 3, 1, 0, 30),
        (100, 2, 1, 16, 128),
        (128, 2, 8, 16, 128),
    ],
)
def test_the_least_length_that_ranks_divide(tokens, ranks, parts, block_rows, length):
    assert padded_length(tokens, ranks, parts, block_rows) == length


def job(**given):
    return Namespace(**{"seq_length": 29, "max_position_embeddings": 29, **SIZES, **given})


def test_a_job_gets_the_padded_length_once_and_its_price_in_one_line():
    args = job()
    (said,) = FEATURE.rewrite(args)
    assert said.startswith("--seq-length 29 is padded to 32")
    assert "3 of 32 rows (9.4 %)" in said
    assert (args.seq_length, args.max_position_embeddings) == (32, 32)
    assert FEATURE.rewrite(args) == ()
    learned = job(position_embedding_type="learned_absolute")
    FEATURE.rewrite(learned)
    assert learned.max_position_embeddings == 29, "it sizes a weight"


def test_it_is_on_where_ranks_do_not_divide_a_sequence():
    for length, is_on in ((29, True), (32, False)):
        with mindspeed_dsa.enabled(seq_length=length, **SIZES):
            assert ("pad-sequences" in {each.name for each in current().features}) == is_on
            args = job(seq_length=length)
            mindspeed_dsa.validate(args)
            assert args.seq_length == 32


def test_older_releases_pad_nothing(monkeypatch):
    monkeypatch.setattr(versions, "of_megatron", lambda root: "0.15.3")
    assert not FEATURE.is_active(job())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor: rows of padding"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "balancing-type sinkhorn balances all rows"),
        ({"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]}, "use aux_loss"),
        (
            {"experimental_attention_variant": "dsa", "dsa_indexer_loss_coeff": 0.1},
            "add --use-fused-dsa",
        ),
        ({"mtp_num_layers": 1, "calculate_per_token_loss": True}, "--calculate-per-token-loss: Megatron"),
        ({"iterations_to_skip": [5]}, "--iterations-to-skip: Megatron reads the batch of a skipped step"),
        ({"sft": True}, "--sft: its batches describe their documents"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_count_padding_is_refused(given, words):
    args = job(**given)
    (problem,) = check_padding(args, Options.of(args))
    assert words in problem
    assert "use a --seq-length that ranks divide" in problem
    fused = job(**given, use_fused_dsa=True)
    assert len(list(check_padding(fused, Options.of(fused)))) == ("experimental" not in str(given))


ODD = Padding(tokens=5, length=8, ranks=2)


def test_batches_get_rows_behind_their_data():
    tokens = torch.arange(10).view(2, 5)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).triu(1)
    batch = {
        "tokens": tokens,
        "loss_mask": torch.ones(2, 5),
        "attention_mask": mask,
        "lengths": torch.ones(1, 3),
    }
    padded = pad({**batch, "name": "text"}, ODD)
    assert padded["tokens"].tolist() == [[0, 1, 2, 3, 4, 0, 0, 0], [5, 6, 7, 8, 9, 0, 0, 0]]
    assert padded["loss_mask"].sum(1).tolist() == [5, 5]
    assert torch.equal(padded["attention_mask"][..., :5, :5], mask)
    assert padded["attention_mask"].sum(dim=(1, 2, 3)).tolist() == [10 + 64 - 25] * 2
    assert padded["lengths"].shape == (1, 3)
    assert padded["name"] == "text"
    # A stage between the first and the last has no tokens.
    assert pad({"tokens": None}, ODD) == {"tokens": None}


def test_batches_of_another_kind_are_an_error():
    with pytest.raises(ValueError, match=r"a batch is a Tensor.*return a dictionary"):
        pad(torch.zeros(2, 5), ODD)
    with pytest.raises(ValueError, match=r"has text, types, and no tokens.*causal models alone"):
        pad({"text": torch.zeros(2, 5), "types": torch.zeros(2, 5)}, ODD)
    with pytest.raises(ValueError, match=r"5 tokens are padded to 8, and a batch has 8.*GPTDatasetConfig"):
        pad({"tokens": torch.zeros(2, 8)}, ODD)


def test_a_rank_knows_its_rows_of_padding():
    # Five tokens padded to eight, in chunks of two rows: rank 0 has chunks 0 and 3, rank 1 has 1 and 2.
    assert counted_rows(ODD, 4, 0).tolist() == [True, True, False, False]
    assert counted_rows(ODD, 4, 1).tolist() == [True, True, True, False]
    assert counted_rows(ODD, 4, 1, before=1).tolist() == [True, True, False, False]
    assert counted_rows(ODD, 3, 0) is None, "sequences of another length"
    assert counted_rows(Padding(8, 8, 2), 4, 0) is None


@pytest.mark.parametrize(
    ("ranks", "padding", "block_rows"), [(2, 3, 16), (4, 7, 2), (3, 40, 8), (4, 64, 8), (2, 1, 1)]
)
def test_the_last_rank_gets_the_padding_of_a_pack(ranks, padding, block_rows):
    length = 64 * ranks
    ends = [0, 5, 6, 23, 24, length - padding]
    pack = Pack.of_prefix_sums(ends if ends[-1] > 24 else [0, 5, 24], None, length)
    layout = BalancedBlocks(ranks, pack, block_rows, padding)
    rows = [layout.rows_of_rank(rank, length) for rank in range(ranks)]
    assert torch.cat(rows).sort().values.tolist() == list(range(length))
    assert rows[-1][-padding:].tolist() == list(range(length - padding, length))
    known = Padding(length - padding, length, ranks, is_pack=True)
    for rank, own in enumerate(rows):
        assert torch.equal(counted_rows(known, 64, rank), own < length - padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_masks_of_every_type_are_averaged_over_ranks(dtype, monkeypatch):
    """Megatron makes an integer mask if a script has none."""
    padding = Padding(tokens=5, length=8, ranks=2)
    context = SimpleNamespace(
        options=SimpleNamespace(padding=padding),
        megatron=lambda name: SimpleNamespace(
            get_context_parallel_group=lambda: SimpleNamespace(rank=lambda: 0, size=lambda: 2)
        ),
    )
    monkeypatch.setattr(batches, "mean_over", lambda count, group: count.float() / 2)
    rolled = batches.roll_data(lambda tensor, *_, **__: (tensor.roll(-1, -1), tensor.sum()), context)
    result, total = rolled(torch.ones(1, 4).to(dtype), -1, -1, None)
    assert total == result.sum() / 2
    assert rolled(torch.zeros(1, 4).to(dtype), -1, -1, None)[1] == 1, "Megatron 0.16 divides by it"
    assert rolled(torch.tensor([[0, 1, 0, 0]]).to(dtype), -1, -1, None)[1] == 0.5, "one token on two ranks"
    assert batches.roll_data(lambda *_, **__: (None, None), context)(None) == (None, None)


def test_documents_that_a_batch_describes_itself_are_refused():
    batch = {"tokens": torch.ones(1, 5), "cu_seqlens": torch.tensor([[0, 3, 5]])}
    with pytest.raises(ValueError, match="cu_seqlens, which say nothing of rows of padding; add --pack-doc"):
        pad(batch, Padding(tokens=5, length=8, ranks=2))


@pytest.mark.parametrize("sequences", [2, 1], ids=["whole", "half"])
def test_the_load_report_counts_tokens_alone(sequences, monkeypatch):
    """Only real tokens count, also for half a microbatch, whose router sees fewer sequences."""
    with mindspeed_dsa.enabled(seq_length=5, context_parallel_size=2, moe_router_load_report="loads"):
        options = current().contexts["moe-router-load-report"].options
    assert options == LoadOptions(Path("loads"), Padding(tokens=5, length=8, ranks=2))
    state = SimpleNamespace(get_context_parallel_rank=lambda: 0)
    counted = []
    context = SimpleNamespace(options=options, megatron=lambda name: state)
    monkeypatch.setattr(
        steps, "counts_of", lambda _: SimpleNamespace(add=lambda _, each: counted.append(each))
    )
    # This rank has rows 0, 1 and 6, 7 of the padded sequence: two tokens and two rows of padding.
    routing_map = torch.arange(4)[:, None].expand(4, sequences).reshape(-1, 1)
    forward = steps.count_tokens(lambda self, input: (None, routing_map), context)
    router = SimpleNamespace(training=True, config=SimpleNamespace(sequence_parallel=False))
    forward(router, torch.zeros(4, sequences, 3))
    assert counted[0].flatten().tolist() == [0] * sequences + [1] * sequences
