from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from mindspeed_dsa import log
from mindspeed_dsa.ops.backend import BackendUnavailable, ShapeClass, choose
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall
from mindspeed_dsa.ops.triton import launch
from tests.ops import oracle
from tests.ops.random_inputs import random_indices
from tests.ops.test_sparse_flash_attention import attention_inputs, expected_of
from tests.ops.triton_backend import DEVICE, attention, common

ROOT = Path(__file__).parents[2]

SHAPES = [
    # rows, heads, dim, value_dim, topk
    pytest.param(2, 128, 576, 512, 20, id="128-heads"),
    pytest.param(3, 16, 576, 512, 71, id="16-heads"),
    pytest.param(5, 1, 40, 32, 7, id="one-head"),
    pytest.param(2, 1, 512, 256, 20, id="head-of-glm"),
    pytest.param(5, 3, 24, 24, 65, id="no-rope"),
    pytest.param(4, 33, 83, 70, 37, id="odd-sizes"),
]


def attend(query, key_value, indices, scale, value_dim, **options):
    tensors = (query.to(DEVICE), key_value.to(DEVICE), indices.to(DEVICE))
    return sparse_flash_attention(*tensors, scale, value_dim=value_dim, backend="triton", **options)


def close(value, expected, *, backward=False):
    if value.dtype == torch.float16:
        assert torch.isfinite(value).all()
        assert oracle.cosine_distance(value, expected) < 1e-6
        assert oracle.norms_differ(value, expected) < 0.01
    else:
        oracle.assert_close(value, expected, backward=backward)


@pytest.mark.parametrize(
    ("dtype", "deterministic"),
    [
        pytest.param(torch.float32, True, id="fp32-True"),
        pytest.param(torch.float32, False, id="fp32-False"),
        pytest.param(torch.bfloat16, True, id="bf16-True"),
        pytest.param(torch.bfloat16, False, id="bf16-False", marks=pytest.mark.full),
        pytest.param(torch.float16, True, id="fp16-True", marks=pytest.mark.full),
        pytest.param(torch.float16, False, id="fp16-False", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(("rows", "heads", "dim", "value_dim", "topk"), SHAPES)
def test_forward_and_backward(rows, heads, dim, value_dim, topk, dtype, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    query, key_value = attention_inputs(2, rows, 83, heads, dim, dtype)
    indices = random_indices(2, rows, 83, topk, empty_rows=(0,))
    scale = 192**-0.5

    out, lse, attention_sum = attend(query, key_value, indices, scale, value_dim, return_attention_sum=True)
    out, lse, attention_sum = out.cpu(), lse.cpu(), attention_sum.cpu()
    inputs, expected, expected_lse, probabilities = expected_of(query, key_value, indices, scale, value_dim)

    close(out.detach(), expected.detach())
    assert (out[:, 0] == 0).all()
    assert oracle.relative_error(lse[:, 1:], expected_lse[:, 1:].detach()) < 1e-6
    assert (lse[:, 0] == -torch.inf).all()
    summed = probabilities.detach().sum(2).gather(-1, indices.clamp_min(0).long())
    assert oracle.relative_error(attention_sum, summed.masked_fill(indices < 0, 0)) < 1e-5

    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(out, (query, key_value), factors)
    expected_grads = torch.autograd.grad(expected, inputs, factors.double())
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == dtype
        close(grad, expected_grad, backward=True)
    assert (grads[0][:, 0] == 0).all()


def test_order_and_padding_of_indices_do_not_matter():
    query, key_value = attention_inputs(1, 4, 60, 5, 40, torch.float32)
    indices = random_indices(1, 4, 60, 30, empty_rows=(2,))
    ascending = torch.where(indices < 0, 60, indices).sort(-1).values
    ascending = torch.where(ascending == 60, -1, ascending).int()
    padded = torch.nn.functional.pad(indices, (0, 50), value=-1)
    results = []
    for variant in (indices, ascending, padded, indices.long()):
        out = attend(query, key_value, variant, 0.3, 40).out
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (query, key_value))))
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            assert oracle.relative_error(value, expected) < 4e-6


def test_keys_that_nobody_selected_are_not_touched():
    """NaN in padding must not spread, not even from position 0, where -1 entries could point."""
    query, key_value = attention_inputs(1, 4, 40, 2, 20, torch.float32)
    indices = random_indices(1, 4, 39, 20, empty_rows=(3,))
    indices = torch.where(indices >= 0, indices + 1, -1).int()
    with torch.no_grad():
        key_value[:, 0] = torch.nan
    out, _, summed = attend(query, key_value, indices, 0.25, 12, return_attention_sum=True)
    for tensor in (out, summed, *torch.autograd.grad(out.sum(), (query, key_value))):
        assert torch.isfinite(tensor).all()


def backward_of(inputs, indices, value_dim, **options):
    query, key_value = (x.detach().to(DEVICE) for x in inputs)
    call = AttentionCall(query, key_value, indices, 0.2, value_dim)
    out, lse, _ = attention.forward(call, False)
    return attention.backward(call, out.cos(), out, lse, **options)


@pytest.mark.parametrize("deterministic", [True, False])
def test_sum_of_the_backward_is_that_of_the_forward(deterministic):
    torch.use_deterministic_algorithms(deterministic)
    inputs = attention_inputs(2, 3, 50, 20, 40, torch.float32)
    indices = random_indices(2, 3, 50, 45, empty_rows=(1,)).to(DEVICE)
    expected = attend(*inputs, indices, 0.2, 32, return_attention_sum=True).attention_sum
    *_, summed = backward_of(inputs, indices, 32, with_sum=True)
    assert oracle.relative_error(summed, expected) < 1e-6
    assert (summed[indices < 0] == 0).all()


def test_gradients_do_not_depend_on_how_rows_are_cut(monkeypatch):
    """Gradients repeat bit for bit, because keys are summed in row order across batch and chunks."""
    inputs = attention_inputs(2, 5, 40, 3, 24, torch.float32)
    indices = random_indices(2, 5, 40, 33, empty_rows=(1,)).to(DEVICE)
    expected = backward_of(inputs, indices, 24, with_sum=True)
    for rows in (1, 4, 10):
        monkeypatch.setattr(attention, "tile_bytes", lambda total, rows=rows: rows * 33 * (3 * 4 + 4 * 24))
        for value, other in zip(backward_of(inputs, indices, 24, with_sum=True), expected, strict=True):
            assert torch.equal(value, other)


def test_many_chunks_are_sorted_at_once_and_one_by_one(monkeypatch):
    """Summation order also holds for a key that a row names twice, whether chunks are sorted together or
    not.
    """
    inputs = attention_inputs(2, 5, 40, 3, 24, torch.float32)
    indices = random_indices(2, 5, 40, 33, empty_rows=(1,)).to(DEVICE)
    indices[1, 2, 7] = indices[1, 2, 3]
    torch.use_deterministic_algorithms(True)
    expected = backward_of(inputs, indices, 24, with_sum=False)[1]
    sorts = []
    order_by_key = attention.order_by_key
    monkeypatch.setattr(attention, "order_by_key", lambda *args: sorts.append(args) or order_by_key(*args))
    monkeypatch.setattr(attention, "tile_bytes", lambda total: 2 * 33 * (3 * 4 + 4 * 24))
    for chunks, times in ((1, 5), (2, 3), (9, 1)):
        sorts.clear()
        monkeypatch.setattr(attention, "WORKSPACE_BYTES", chunks * 42 * 2 * 33)
        assert torch.equal(backward_of(inputs, indices, 24, with_sum=False)[1], expected)
        assert len(sorts) == times


def test_stored_order_of_heads():
    # Score gradients come in the order of heads that Hopper kernels store, in complete groups of heads.
    rows, heads, keys, topk, dim = 2, 40, 30, 20, 24
    kernel, stored = attention.backward_query_kernel, 64
    # Whole numbers have exact sums. Otherwise a CPU product may round by a row's place in its tile.
    key_value = torch.randint(-8, 9, (1, keys, dim), device=DEVICE).float()
    indices = random_indices(1, rows, keys, topk).to(DEVICE)
    lengths = common.row_lengths(indices, keys)
    natural = torch.randint(-8, 9, (rows, topk, heads), device=DEVICE).float()
    place = torch.arange(stored, device=DEVICE)
    head = place // 16 * 16 + place % 4 * 4 + place % 16 // 4
    grouped = torch.nn.functional.pad(natural, (0, stored - heads), value=torch.nan)[..., head].contiguous()
    constants = {"VALUE_DIM": 16, "TAIL_DIM": 8, "BLOCK_V": 16, "BLOCK_T": 16, "WIDEN": False}
    constants |= {"BLOCK_H": 16, "BLOCK_N": 16, "PARTS": 1}
    results = []
    for scores, width, groups in ((natural, heads, 1), (grouped, stored, 4)):
        result = torch.full((rows, heads, dim), torch.nan, device=DEVICE)
        kernel[(rows * common.triton.cdiv(width, 16),)](
            *(key_value, indices, lengths, scores, result, 0, rows, keys, heads, width, topk),
            *key_value.stride()[:2],
            **constants,
            GROUPS=groups,
        )
        results.append(result)
    assert torch.equal(*results)
    assert torch.isfinite(results[0]).all()


def test_scratch_is_bounded(monkeypatch):
    """Apart from inputs and results, no tensor is larger than the budget or than eight sums of tiles."""
    monkeypatch.setattr(attention, "tile_bytes", lambda total: 40_000)
    inputs = attention_inputs(1, 8, 64, 4, 32, torch.float32)
    indices = random_indices(1, 8, 64, 60).to(DEVICE)
    sizes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.empty:
                sizes.append(result.numel() * result.element_size())
            return result

    with Watch():
        backward_of(inputs, indices, 24, with_sum=False)
    assert len(sizes) > 5
    assert max(sizes) <= 40_000
    large, small = torch.empty(2**22, 576, device="meta"), torch.empty(8192, 576, device="meta")
    assert common.tile_bytes(small) == common.WORKSPACE_BYTES
    assert common.tile_bytes(large) == 8 * 4 * 2**22 * 576


def test_any_strides():
    query, key_value = attention_inputs(2, 3, 30, 4, 24, torch.float32)
    indices = random_indices(2, 3, 30, 9)
    results = []
    for make in (
        lambda x: x,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    ):
        leaves = [x.detach().clone().requires_grad_() for x in (query, key_value)]
        out = attend(*map(make, leaves), indices, 0.3, 16).out
        # One gradient has gaps, the other one is expanded.
        grads = torch.autograd.grad(make(out.transpose(1, 2)).square().sum() + out.sum(), leaves)
        results.append((out.detach(), *grads))
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            assert torch.equal(value, expected)


def test_offsets_beyond_32_bits(tmp_path):
    # Rows, heads, sequences and keys lie more than 2^31 numbers apart; on CPUs the tensor is a sparse file.
    far = 2**31 + 160
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of the GPU")

    def spread(tensor, *strides):
        need = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
        if DEVICE == "cpu":
            path = str(tmp_path / f"{need}-{len(list(tmp_path.iterdir()))}")
            flat = torch.from_file(path, shared=True, size=need, dtype=tensor.dtype)
        else:
            torch.cuda.empty_cache()
            flat = torch.empty(need, dtype=tensor.dtype, device=DEVICE)  # 28 GiB
        return flat.as_strided(tensor.shape, strides).copy_(tensor)

    inputs = attention_inputs(2, 2, 4, 2, 24, torch.bfloat16)
    query, key_value = (x.detach().to(DEVICE) for x in inputs)
    indices = random_indices(2, 2, 4, 3).to(DEVICE)
    variants = [
        lambda: (spread(query, 4 * far, 2 * far, far, 1), key_value),
        lambda: (query, spread(key_value, 4 * far, far, 1)),
    ]
    call = AttentionCall(query, key_value, indices, 0.3, 16)
    expected = attention.forward(call, True)
    expected_grads = attention.backward(call, expected[0], *expected[:2], True)
    for variant in variants:
        q, kv = variant()
        call = AttentionCall(q, kv, indices, 0.3, 16)
        found = attention.forward(call, True)
        grads = attention.backward(call, found[0], *found[:2], True)
        for value, other in zip((*found, *grads), (*expected, *expected_grads), strict=True):
            assert torch.equal(value, other)
        del q, kv, call


def test_nothing_to_do():
    for rows, topk in ((0, 4), (3, 1)):
        query, key_value = attention_inputs(1, rows, 5, 2, 8, torch.float32)
        indices = torch.full((1, rows, topk), -1, dtype=torch.int32)
        out, lse, summed = attend(query, key_value, indices, 1.0, 8, return_attention_sum=True)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        assert summed.shape == (1, rows, topk)
        for grad in torch.autograd.grad(out.sum(), (query, key_value)):
            assert (grad == 0).all()


@settings(max_examples=8, deadline=None)
@given(
    batch=st.integers(1, 2),
    rows=st.integers(1, 3),
    keys=st.integers(1, 90),
    heads=st.integers(1, 20),
    sizes=st.tuples(st.integers(1, 40), st.integers(0, 20)),
    topk=st.integers(1, 90),
    seed=st.integers(0, 1000),
)
def test_any_shape(batch, rows, keys, heads, sizes, topk, seed):
    value_dim, rope_dim = sizes
    query, key_value = attention_inputs(batch, rows, keys, heads, value_dim + rope_dim, torch.float32, seed)
    indices = random_indices(batch, rows, keys, min(topk, keys), seed, empty_rows=(seed % rows,))
    out = attend(query, key_value, indices, 0.4, value_dim).out.cpu()
    inputs, expected, _, _ = expected_of(query, key_value, indices, 0.4, value_dim)
    assert (out - expected).abs().max() < 1e-5
    grads = torch.autograd.grad(out.sin().sum(), (query, key_value))
    expected_grads = torch.autograd.grad(expected.sin().sum(), inputs)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert (grad - expected_grad).abs().max() < 1e-5 * max(1, expected_grad.abs().max())


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "value_dim", "reason"),
    [
        ("cuda", torch.float64, 576, 512, "compute in fp32"),
        ("cuda", torch.bfloat16, 576, 520, "520 + 56 numbers"),
        ("cuda", torch.bfloat16, 768, 512, "exceed the 640"),
        ("npu", torch.bfloat16, 576, 512, "runs on CUDA devices"),
    ],
)
def test_limits_are_named(device, dtype, dim, value_dim, reason):
    sizes = (("heads", 16), ("dim", dim), ("value_dim", value_dim), ("topk", 8))
    found = attention.unsupported(ShapeClass(device, dtype, sizes))
    assert found is not None
    assert reason in found


# The last two are GLM-5's, absorbed and by head: value width 256, key width 192 + 64.
SIZES = [(1, 576, 512), (128, 576, 512), (7, 640, 512), (64, 576, 512), (1, 512, 256)]


@pytest.mark.parametrize(("heads", "dim", "value_dim"), SIZES)
def test_what_is_taken(heads, dim, value_dim, monkeypatch):
    sizes = (("heads", heads), ("dim", dim), ("value_dim", value_dim), ("topk", 2048))
    assert attention.unsupported(ShapeClass("cuda", torch.bfloat16, sizes)) is None
    monkeypatch.setattr(common, "_OLDEST", Version("99"))
    assert "triton 99 or later" in common.unsupported_here(ShapeClass("cuda", torch.bfloat16, sizes))
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "NVIDIA" in common.unsupported_here(ShapeClass("cuda", torch.bfloat16, sizes))


def on_a_gpu_of(monkeypatch, *capability):
    """Pretend to have a GPU of this compute capability; only the capability is read."""
    if DEVICE != "cpu":
        # On a real GPU, Triton would compile all further kernels of this process for the pretended one.
        pytest.skip("pretends that there is another GPU")
    choose.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)


def shape_of(operator, heads, dtype=torch.bfloat16, index_heads=64):
    sizes = {"heads": heads, "dim": 576, "value_dim": 512, "topk": 2048, "key_heads": 1}
    index = {"index_heads": index_heads, "index_dim": 128}
    if operator == "lightning_indexer":
        sizes = {"heads": index_heads, "head_dim": 128, "topk": 2048}
    return ShapeClass("cuda", dtype, tuple((sizes | index).items()))


OPERATORS = ["lightning_indexer", "sparse_flash_attention", "indexer_kl_loss"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_gpus_before_bf16_products(operator, monkeypatch):
    on_a_gpu_of(monkeypatch, 7, 5)
    shape = shape_of(operator, 16)
    with pytest.raises(BackendUnavailable, match=r"capability 8\.0, and this GPU is of 7\.5\. Ask"):
        choose(operator, "triton", shape)
    assert choose(operator, "auto", shape).__name__.endswith(f"{operator}.chunked")
    choose.cache_clear()


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_later_gpu_has_tiles(operator, capability, monkeypatch):
    # This checks the choice of tiles only. The compile tests check that they fit.
    on_a_gpu_of(monkeypatch, *capability)
    for heads, index_heads in ((1, 64), (17, 64), (128, 64), (64, 32)):
        for backend in ("auto", "triton"):
            chosen = choose(operator, backend, shape_of(operator, heads, index_heads=index_heads))
            assert chosen.__name__.endswith(f"{operator}.triton")
    choose.cache_clear()


@pytest.mark.parametrize(("capability", "fits"), [((8, 9), False), ((12, 0), False), ((8, 0), True)])
def test_indexers_that_a_small_gpu_cannot_hold(capability, fits, monkeypatch):
    on_a_gpu_of(monkeypatch, *capability)
    sizes = (("heads", 128), ("head_dim", 256), ("topk", 2048))
    shape = ShapeClass("cuda", torch.bfloat16, sizes)
    assert (choose("lightning_indexer", "auto", shape).__name__.endswith(".triton")) is fits
    if not fits:
        with pytest.raises(BackendUnavailable, match=r"at most 64 of 128 numbers, and these are 128 of 256"):
            choose("lightning_indexer", "triton", shape)
    choose.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "tolerance"),
    [*((each, torch.bfloat16, 2e-2) for each in (80, 100, 120)), (120, torch.float32, 1e-5)],
)
@pytest.mark.parametrize("heads", [5, 40])
def test_tiles_of_other_gpus_compute_the_same(heads, capability, dtype, tolerance, monkeypatch):
    query, key_value = attention_inputs(1, 3, 70, heads, 24, dtype)
    indices = random_indices(1, 3, 70, 67, empty_rows=(1,))
    grad = torch.randn(1, 3, heads, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)

    def both_ways():
        found = attend(query, key_value, indices, 0.3, 16, return_attention_sum=True)
        return *found, *torch.autograd.grad(found.out, (query, key_value), grad)

    expected = both_ways()
    monkeypatch.setattr(launch, "capability_of", lambda device: capability)
    for value, other in zip(both_ways(), expected, strict=True):
        torch.testing.assert_close(value, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("operator", OPERATORS)
def test_compilers_before_3_4_are_for_the_interpreter_only(operator, monkeypatch):
    on_a_gpu_of(monkeypatch, 9, 0)
    monkeypatch.setattr(common.triton, "__version__", "3.3.1")
    shape = shape_of(operator, 16)
    with pytest.raises(BackendUnavailable, match=r"need triton 3\.4 or later, and 3\.3\.1 is installed"):
        choose(operator, "triton", shape)
    assert choose(operator, "auto", shape).__name__.endswith(f"{operator}.chunked")
    monkeypatch.setattr(common, "interpreted", lambda: True)
    assert common.unsupported_here(ShapeClass("cpu", torch.float32, shape.sizes)) is None
    choose.cache_clear()


WITHOUT_BRANCHES = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import pytest, triton
triton.__version__ = "3.6.0"
from mindspeed_dsa.ops.triton import common
assert not common.TAKES_BRANCHES.value
chosen = "(head-of-glm or odd-sizes) and True and " + sys.argv[2]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", chosen, sys.argv[1]]))
"""


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_compilers_before_3_7_get_kernels_without_branches(dtype):
    command = [sys.executable, "-c", WITHOUT_BRANCHES, __file__, dtype]
    done = subprocess.run(command, cwd=ROOT, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_slower_kernels_are_told_of_once(monkeypatch, capsys):
    on_a_gpu_of(monkeypatch, 8, 0)
    monkeypatch.setattr(common, "TAKES_BRANCHES", triton.language.constexpr(False))
    log.forget()
    for _ in range(2):
        assert common.unsupported_here(shape_of("sparse_flash_attention", 16)) is None
    assert capsys.readouterr().err.count("to slower code") == 1


def test_an_explicit_request_names_the_limit():
    query, key_value = attention_inputs(1, 2, 8, 2, 600, torch.float32)
    with pytest.raises(BackendUnavailable, match=r"'triton' cannot run .* 599 \+ 1 numbers"):
        attend(query, key_value, random_indices(1, 2, 8, 4), 1.0, 599)
