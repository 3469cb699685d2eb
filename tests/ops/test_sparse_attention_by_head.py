"""CPU attention with one key and value per head, other keys masked, against the oracle."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import backend, checks
from mindspeed_dsa.ops.cpu import threads as cpu_threads
from mindspeed_dsa.ops.sparse_flash_attention import by_head, cpu_heads
from mindspeed_dsa.ops.sparse_flash_attention.by_head import is_faster_by_head, sparse_attention_by_head
from tests.ops import oracle
from tests.ops.random_inputs import DTYPES, packed_ranges, random_indices
from tests.support.counting import noted

SHAPES = [(1, 7, 5, 3), (3, 40, 24, 17), (16, 192, 128, 60)]


def inputs(batch, rows, keys, heads, dim, value_dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, rows, heads, dim), (batch, keys, heads, dim), (batch, keys, heads, value_dim)
    made = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return made, torch.randn(batch, rows, heads, value_dim, generator=generator).to(dtype)


def expected_of(tensors, indices, scale, grad):
    """Return output, attention sum and gradients in fp64, computed head by head by the oracle."""
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    query, key, value = leaves
    mask = oracle.selected_mask(indices, key.shape[1])
    scores = scale * torch.einsum("bshd,bthd->bsht", query, key)
    probabilities = scores.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1).nan_to_num(0)
    out = torch.einsum("bsht,bthc->bshc", probabilities, value)
    keys_at = indices.clamp_min(0).long()
    summed = probabilities.sum(2).gather(-1, keys_at).masked_fill(indices < 0, 0)
    return out, summed, torch.autograd.grad(out, leaves, grad.double())


@pytest.fixture(autouse=True)
def masked_calls(monkeypatch):
    """Return the list of masked-form functions that were called."""
    return noted(monkeypatch, cpu_heads.forward, cpu_heads.backward)


def check(tensors, grad, indices, scale, name="cpu"):
    out, summed = sparse_attention_by_head(*tensors, indices, scale, return_attention_sum=True, backend=name)
    gradients = torch.autograd.grad(out, tensors, grad)
    expected, expected_sum, expected_gradients = expected_of(tensors, indices, scale, grad)
    oracle.assert_close(out, expected)
    assert oracle.relative_error(summed, expected_sum) < 1e-5
    assert not summed.requires_grad
    for found, wanted, tensor in zip(gradients, expected_gradients, tensors, strict=True):
        assert found.dtype == tensor.dtype
        oracle.assert_close(found, wanted, backward=True)
    return out, gradients


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("heads", "dim", "value_dim", "topk"), SHAPES)
def test_equals_the_oracle(dtype, heads, dim, value_dim, topk):
    tensors, grad = inputs(2, 19, 83, heads, dim, value_dim, dtype)
    indices = random_indices(2, 19, 83, topk, empty_rows=(0, 7))
    before = backend.calls()
    out, gradients = check(tensors, grad, indices, dim**-0.5)
    few = by_head._MOST_TIMES * topk >= 83
    assert backend.calls() - before == {("sparse_flash_attention", "cpu"): 1 if few else heads}
    for rows in (out, gradients[0]):
        assert (rows[:, [0, 7]] == 0).all()


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize(("name", "keys"), [("cpu", 83), ("cpu", 400), ("chunked", 83)])
def test_heads_that_share_a_key(name, keys, kv_heads):
    (query, key, value), grad = inputs(2, 19, keys, 6, 24, 16)
    key, value = (x.detach()[:, :, :kv_heads].clone().requires_grad_() for x in (key, value))
    indices = random_indices(2, 19, keys, 17, empty_rows=(4,))
    out, summed = sparse_attention_by_head(
        query, key, value, indices, 0.3, return_attention_sum=True, backend=name
    )
    each = [x.repeat_interleave(6 // kv_heads, dim=2) for x in (key, value)]
    expected, expected_sum, (of_query, *of_keys) = expected_of((query, *each), indices, 0.3, grad)
    oracle.assert_close(out, expected)
    assert oracle.relative_error(summed, expected_sum) < 1e-5
    of_keys = [x.unflatten(2, (kv_heads, -1)).sum(3) for x in of_keys]
    for found, wanted in zip(
        torch.autograd.grad(out, (query, key, value), grad), (of_query, *of_keys), strict=True
    ):
        oracle.assert_close(found, wanted, backward=True)


def test_key_heads_that_do_not_divide_the_heads_are_refused():
    (query, key, value), _ = inputs(1, 4, 9, 6, 8, 8)
    with pytest.raises(ValueError, match="6 heads cannot share 4 key-value heads evenly"):
        sparse_attention_by_head(query, key[:, :, :4], value[:, :, :4], random_indices(1, 4, 9, 3), 0.3)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_cut_and_share_gives_the_same(threads, masked_calls, monkeypatch):
    tensors, grad = inputs(2, 60, 90, 5, 12, 8)
    indices = random_indices(2, 60, 90, 30, empty_rows=(3,))
    whole, _ = check(tensors, grad, indices, 0.3)
    monkeypatch.setattr(cpu_heads, "_FEWEST_ROWS", 7)
    monkeypatch.setattr(cpu_heads, "_MOST_ROWS", 7)
    monkeypatch.setattr(cpu_heads, "worker_count", lambda numbers: threads)
    out, gradients = check(tensors, grad, indices, 0.3)
    torch.testing.assert_close(out, whole)
    monkeypatch.setattr(cpu_heads, "worker_count", lambda numbers: 1)
    _, alone = check(tensors, grad, indices, 0.3)
    for one, other in zip(gradients, alone, strict=True):
        torch.testing.assert_close(one, other)
    assert masked_calls == ["forward", "backward"] * 3


def test_entries_without_a_key_may_stand_anywhere(masked_calls):
    # As in the other operators, an entry without a key must not replace a key, not even key 0.
    checks.set_debug_checks(False)
    tensors, grad = inputs(1, 8, 80, 3, 12, 8)
    indices = random_indices(1, 8, 70, 20)
    indices[0, 1, 0], indices[0, 2, :3], indices[0, 3, 5] = -1, -1, -1
    out, _ = check(tensors, grad, indices, 0.3)
    beyond = indices.masked_fill(indices < 0, 80)
    assert torch.equal(sparse_attention_by_head(*tensors, beyond, 0.3)[0], out)
    assert masked_calls == ["forward", "backward", "forward"]


def test_packed_sequences_and_causal_rows(monkeypatch):
    monkeypatch.setattr(cpu_heads, "_MOST_ROWS", 16)
    starts, ends = packed_ranges(20, 31, 39)
    position = torch.arange(90)
    visible = (position >= starts[:, None]) & (position < ends[:, None])
    indices = torch.where(visible, position, -1).sort(-1, descending=True).values[:, :39].int()
    tensors, grad = inputs(1, 90, 90, 3, 12, 8)
    check(tensors, grad, indices[None], 0.3)


def test_scores_far_apart_neither_overflow_nor_vanish():
    tensors, grad = inputs(1, 23, 90, 3, 12, 8)
    with torch.no_grad():
        tensors[0].abs_()
        tensors[1][:, 0] = 1e4
    indices = random_indices(1, 23, 89, 30) + 1
    indices = indices.masked_fill(indices == 0, -1)
    _, (_, to_keys, to_values) = check(tensors, grad, indices, 3.0)
    assert (to_keys[:, 0] == 0).all()
    assert (to_values[:, 0] == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["query", "key", "value", "gradient"])
def test_what_is_not_finite_reaches_what_depends_on_it_only(where, value, masked_calls):
    tensors, grad = inputs(1, 20, 40, 2, 8, 6)
    indices = random_indices(1, 20, 39, 12)
    at = {"query": (tensors[0], 5), "key": (tensors[1], 39), "value": (tensors[2], 39), "gradient": (grad, 5)}
    tensor, row = at[where]
    with torch.no_grad():
        tensor[:, row] = value
    out, _ = sparse_attention_by_head(*tensors, indices, 0.3, backend="cpu")
    to_query, to_key, to_value = torch.autograd.grad(out, tensors, grad)
    others = torch.arange(20) != 5
    assert out[:, others].isfinite().all()
    assert to_query[:, others].isfinite().all()
    unread = torch.ones(40, dtype=torch.bool)
    unread[indices[0, 5].clamp_min(0).long()] = False
    for gradient in (to_key, to_value):
        assert gradient[:, unread if where in ("query", "gradient") else slice(None)].isfinite().all()
    assert out[:, 5].isfinite().all() == (where != "query")
    assert masked_calls == (["forward"] if where == "gradient" else [])


def test_many_more_keys_than_selected_ones_are_gathered(masked_calls):
    tensors, grad = inputs(1, 6, 91, 2, 8, 6)
    check(tensors, grad, random_indices(1, 6, 91, 5), 0.3)
    assert masked_calls == []


def test_other_backends_go_head_by_head(masked_calls):
    tensors, grad = inputs(1, 20, 40, 2, 8, 6)
    check(tensors, grad, random_indices(1, 20, 40, 12), 0.3, "reference")
    assert masked_calls == []


DEEPSEEK, GLM = (192 + 128, 576 + 512), (256 + 256, 576 + 512)


@pytest.mark.parametrize(
    ("heads", "widths", "times"),
    [(16, DEEPSEEK, 14), (64, DEEPSEEK, 7.3), (16, GLM, 8.7), (64, GLM, 4.5), (1, DEEPSEEK, 17)],
)
def test_up_to_how_many_keys_it_is_faster(heads, widths, times):
    """With fewer and narrower heads, masking beats gathering up to more keys."""
    cpu = torch.device("cpu")
    assert is_faster_by_head(cpu, int(times * 512), 512, heads, widths)
    assert not is_faster_by_head(cpu, int((times + 0.2) * 512), 512, heads, widths)


def test_where_it_is_faster():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not is_faster_by_head(cpu, by_head._FEWEST_KEYS - 1, 64, 16, DEEPSEEK)
    assert not is_faster_by_head(cpu, 4096, 512, 16, DEEPSEEK, "chunked")
    assert not is_faster_by_head(cuda, 4096, 512, 16, DEEPSEEK)
    # Every key is selected: dense attention.
    assert is_faster_by_head(cuda, 512, 512, 16, DEEPSEEK, "triton")


def test_bad_input_is_refused():
    tensors, _ = inputs(1, 4, 10, 2, 8, 6)
    query, key, value = tensors
    indices = random_indices(1, 4, 10, 3)
    with pytest.raises(ValueError, match=r"value must be \[1, 10, 1, value_dim\]"):
        sparse_attention_by_head(query, key[:, :, :1], value, indices, 1.0)
    with pytest.raises(ValueError, match=r"value must be \[1, 10, 2, value_dim\]"):
        sparse_attention_by_head(query, key, value[:, :9], indices, 1.0)
    with pytest.raises(ValueError, match="must have the dtype"):
        sparse_attention_by_head(query, key, value.double(), indices, 1.0)
    with pytest.raises(ValueError, match="must lie in"):
        sparse_attention_by_head(query, key, value, indices + 10, 1.0)


@pytest.mark.parametrize("threads", [1, 2, 9, 12])
@pytest.mark.parametrize("keys", [192, 257])
def test_threads_and_odd_lengths_change_nothing(threads, keys, monkeypatch):
    monkeypatch.setattr(cpu_threads, "_SMALL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensors, grad = inputs(2, 40, keys, 4, 12, 8, torch.bfloat16)
        check(tensors, grad, random_indices(2, 40, keys, 30, empty_rows=(3,)), 0.3)
    finally:
        torch.set_num_threads(before)
