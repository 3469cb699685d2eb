"""Selections by FP8 scores: bit-identical to DeepSeek's formulas for every PyTorch backend."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.backend import BackendUnavailable, ShapeClass, choose
from mindspeed_dsa.ops.lightning_indexer import chunked as chunked_indexer
from mindspeed_dsa.ops.lightning_indexer import cpu as cpu_indexer
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.quantised_indexer import arithmetic, quantised_indexer
from mindspeed_dsa.ops.quantised_indexer import cpu as quantised_cpu
from tests.ops import engine_formulas
from tests.ops.random_inputs import (
    BACKENDS,
    DTYPES,
    IndexerInputs,
    indexer_inputs,
    packed_ranges,
    tied_inputs,
)
from tests.ops.test_lightning_indexer import causal

FACTORS = {"ue8m0": True, "plain": False}
every_factor = pytest.mark.parametrize("ue8m0", FACTORS.values(), ids=FACTORS)


def same_bits(rows, ue8m0):
    values, factors = arithmetic.quantise(rows, ue8m0)
    expected, scale = engine_formulas.act_quant(rows, ue8m0)
    finite = rows.isfinite().all(-1)
    assert torch.equal(
        values.to(torch.float8_e4m3fn)[finite].view(torch.uint8), expected[finite].view(torch.uint8)
    )
    assert torch.equal(values[finite], expected.float()[finite])
    assert torch.equal(factors[finite], scale[finite])
    assert factors[~finite].isnan().all()


# -- rows --------------------------------------------------------------------------------------


@every_factor
def test_every_number_of_bf16_as_the_largest_of_a_row(ue8m0):
    """A row's maximum may be any bf16 value, including zeros, subnormals, powers of two, infinities and
    NaN.
    """
    # All 2^16 bit patterns.
    largest = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    rest = torch.linspace(-1, 1, 31, dtype=torch.float64)
    same_bits(torch.cat([largest[:, None], (largest.double()[:, None] * rest).bfloat16()], 1), ue8m0)


@every_factor
def test_largest_magnitudes_around_powers_of_two(ue8m0):
    # 448 x 2^n and its fp32 neighbours, where an exponent from a logarithm would be off by one.
    powers = 448 * 2.0 ** torch.arange(-60, 60)
    around = torch.cat(
        [powers, powers.nextafter(torch.tensor(torch.inf)), powers.nextafter(torch.tensor(0.0))]
    )
    same_bits(around[:, None] * torch.tensor([1.0, 0.5, -0.3, 0.001]), ue8m0)


@every_factor
@pytest.mark.parametrize("dim", [1, 16, 64, 128, 192])
def test_rows_of_every_width(dim, ue8m0):
    generator = torch.Generator().manual_seed(dim)
    # One row per magnitude, from 1e-12 to 1e12.
    rows = torch.randn(300, dim, generator=generator) * 10 ** torch.linspace(-12, 12, 300)[:, None]
    rows[7] = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        same_bits(rows.to(dtype), ue8m0)


def test_numbers_between_those_of_e4m3_go_to_the_even_one():
    # The 127 non-negative finite values of e4m3; codes above 126 are NaN and negative numbers.
    numbers = torch.arange(0, 127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    around = torch.cat([between, between.nextafter(torch.tensor(0.0)), between.nextafter(torch.tensor(1e3))])
    rows = torch.cat([numbers, around, -around])
    # The second column makes the scale 1.
    rows = torch.stack([rows, torch.full_like(rows, 448.0)], dim=1)
    assert (arithmetic.quantise(rows, True)[1] == 1).all()
    same_bits(rows, True)


# -- scores ------------------------------------------------------------------------------------


def test_products_are_exact_and_rounded_once():
    # Products need 43 bits, so fp32 sums are wrong in any order.
    generator = torch.Generator().manual_seed(3)
    numbers = torch.arange(0, 256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[~numbers.isnan()]
    query, key = (numbers[torch.randint(len(numbers), (n, 128), generator=generator)] for n in (20, 60))
    # The largest and the smallest products.
    query[0], key[0] = 448.0, 2.0**-9
    query[1], key[1] = 448.0, 448.0
    query[1, 0], key[1, 0] = 2.0**-9, 2.0**-9
    scores = arithmetic.exact_scores(query[:, None], key, torch.ones(20, 1), torch.ones(60), False)
    expected = [[engine_formulas.exact_product(q, k) for k in key] for q in query]
    assert scores.tolist() == expected
    # Otherwise the test could not tell exact products from fp32 sums.
    assert scores.tolist() != (query @ key.T).tolist()


@every_factor
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 12, 64])
def test_scores_are_those_of_the_engines_kernels(heads, ue8m0):
    # 9 query tokens, 31 keys.
    query, key, weights = indexer_inputs(2, 9, 31, heads, 128, torch.bfloat16, seed=heads)
    q8, of_query = arithmetic.quantise(query, ue8m0)
    k8, of_key = arithmetic.quantise(key, ue8m0)
    for use_relu in (True, False):
        found = arithmetic.exact_scores(q8, k8, weights.float() * of_query, of_key, use_relu)
        assert torch.equal(found, engine_formulas.scores(query, key, weights, ue8m0, use_relu))


def test_scores_do_not_depend_on_how_many_are_formed_at_once(monkeypatch):
    query, key, weights = (x.float() for x in indexer_inputs(1, 9, 31, 7, 32, torch.bfloat16))
    key, of_key = arithmetic.quantise(key, True)
    query, of_query = arithmetic.quantise(query, True)
    arguments = (query, key, weights * of_query, of_key, True)
    expected = arithmetic.exact_scores(*arguments)
    # Products of four keys at a time: 9 tokens x 7 heads x 4.
    monkeypatch.setattr(arithmetic, "_PRODUCTS", 9 * 7 * 4)
    assert torch.equal(arithmetic.exact_scores(*arguments), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_sums_lie_within_the_bound(dtype):
    for seed, (heads, dim) in enumerate([(1, 128), (4, 64), (64, 128), (3, 8)]):
        query, key, weights = indexer_inputs(1, 40, 200, heads, dim, dtype, seed)
        query = query * 10 ** torch.linspace(-3, 3, 40)[:, None, None]
        query, of_query = arithmetic.quantise(query, False)
        key, of_key = arithmetic.quantise(key, False)
        weights = weights.float() * of_query
        bound = arithmetic.largest_difference(
            query, weights, arithmetic.longest_key(key, of_key), float(of_key.max())
        )
        exact = arithmetic.exact_scores(query, key, weights, of_key, True)
        # The same products, summed in reverse order in fp32.
        backwards = torch.einsum("bshd,btd->bsht", query.flip(-1), key.flip(-1)).relu()
        other = torch.einsum("bsht,bsh->bst", backwards, weights) * of_key[:, None]
        difference = (other - exact).abs().amax(-1)
        assert (difference <= bound).all()
        assert (difference > 0).any()
        # The bound is much smaller than the scores.
        assert (bound < 1e-2 * exact.abs().amax(-1)).all()


# -- selections --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@every_factor
@pytest.mark.parametrize(("dtype", "use_relu"), [(torch.bfloat16, True), (torch.float32, False)])
def test_selections_are_those_of_the_formulas(backend, dtype, use_relu, ue8m0):
    inputs = indexer_inputs(2, 60, heads=4, dim=128, dtype=dtype)
    starts, ends = packed_ranges(25, 1, 34)
    # Row 7 sees no key.
    ends[7] = starts[7]
    expected = engine_formulas.selection(inputs, 9, starts, ends, ue8m0, use_relu)
    topk_indices = quantised_indexer(
        *inputs, 9, powers_of_two=ue8m0, starts=starts, ends=ends, use_relu=use_relu, backend=backend
    )
    assert topk_indices.dtype == torch.int32
    assert torch.equal(topk_indices, expected)
    assert (topk_indices[:, 7] == -1).all()
    # FP8 does change the selection.
    full = lightning_indexer(*inputs, 9, starts=starts, ends=ends, use_relu=use_relu, backend=backend)
    assert 0.6 < (topk_indices == full.topk_indices).float().mean() < 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lower_position(backend):
    inputs = tied_inputs()
    expected = engine_formulas.selection(inputs, 7, *causal(40), True)
    assert torch.equal(quantised_indexer(*inputs, 7, backend=backend), expected)


def equal_in_exact_sums() -> IndexerInputs:
    """Return keys with permuted coordinates: equal scores in exact sums, which fp32 sums round apart.

    Every second key is halved, so that rounding cannot lift it above the others.
    """
    generator = torch.Generator().manual_seed(5)
    # Magnitudes from 2^-8 to 2^9, so fp32 sums depend on their order.
    numbers = (2 ** (torch.rand(128, generator=generator) * 17 - 8)).bfloat16()
    numbers[0] = 448
    orders = torch.rand(1, 300, 128, generator=generator).argsort(-1)
    key = numbers[orders]
    key[:, ::2] *= 0.5
    query = torch.ones(1, 8, 6, 128, dtype=torch.bfloat16) * torch.linspace(1, 2, 6).bfloat16()[:, None]
    return IndexerInputs(query, key, torch.rand(1, 8, 6, generator=generator).bfloat16())


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_scores_that_other_sums_would_tell_apart(backend, monkeypatch):
    inputs = equal_in_exact_sums()
    ends = torch.linspace(60, 300, 8).int()
    # Odd keys are the ones that were not halved; the lowest 20 of them win all ties.
    expected = torch.arange(1, 41, 2).expand(1, 8, 20)
    found = quantised_indexer(*inputs, 20, ends=ends, backend=backend)
    assert torch.equal(found.long(), expected)
    if backend == "cpu":
        # Without the exact recomputation of near ties, fp32 sums would decide otherwise.
        monkeypatch.setattr(quantised_cpu, "_settle", lambda *_: None)
        assert not torch.equal(quantised_indexer(*inputs, 20, ends=ends, backend=backend).long(), expected)


@pytest.mark.parametrize("backend", ["chunked", "cpu"])
@pytest.mark.usefixtures("operands_that_are_no_numbers")
def test_rows_and_keys_that_are_not_finite(backend):
    inputs = [x.clone() for x in indexer_inputs(2, 50, heads=3, dim=32)]
    # Bad keys, query tokens and weights in both sequences, and rows with all-zero scores.
    query, key, weights = inputs
    key[0, 3], key[0, 9, 1], key[1, 4, 5] = torch.nan, torch.inf, -torch.inf
    query[0, 20, 1, 2], query[1, 30] = torch.nan, torch.inf
    weights[0, 40, 0], weights[1, 41, 2], weights[1, 42, 1] = torch.nan, torch.inf, 3e38
    weights[1, 43], query[1, 44] = 0, 0
    expected = engine_formulas.selection(inputs, 8, *causal(50), True)
    for one in ("reference", backend):
        assert torch.equal(quantised_indexer(*inputs, 8, backend=one), expected)
    # NaN comes after all numbers, and is listed where there are fewer than eight numbers.
    # Key 3 is NaN, and rows 12 to 19 see at least eight other keys.
    assert not (found := quantised_indexer(*inputs, 8, backend=backend)[0, 12:20]).eq(3).any()
    assert (found >= 0).all()
    assert quantised_indexer(*inputs, 8, backend=backend)[0, 5].tolist() == [0, 1, 2, 3, 4, 5, -1, -1]


def _of_a_kind(kind: str, seed: int) -> IndexerInputs:
    # Different numbers of heads and widths per seed.
    inputs = indexer_inputs(2, 40, 300, (1, 2, 5, 16)[seed % 4], (8, 64, 128)[seed % 3], torch.bfloat16, seed)
    query, key, weights = inputs
    if kind == "few values":
        return IndexerInputs(*(x.float().round() for x in inputs))
    if kind == "many orders of magnitude":
        return IndexerInputs(*(x.sign() * torch.exp2(3 * x) for x in inputs))
    if kind == "keys that come again":
        return IndexerInputs(query, key[:, torch.arange(300) % 60], weights)
    if kind == "rows of zeros":
        return IndexerInputs(query * (torch.arange(40) % 3 > 0)[:, None, None], key, weights)
    if kind == "below the normal numbers":
        # fp32 subnormals, and below numbers close to the largest fp32 number.
        return IndexerInputs(query, key, weights.float() * 1e-43)
    return IndexerInputs(query, key, weights.float() * 1e37)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "kind",
    [
        *("few values", "many orders of magnitude", "keys that come again", "rows of zeros"),
        *("below the normal numbers", "near the largest numbers"),
    ],
)
def test_numbers_of_every_kind(kind, seed):
    inputs = _of_a_kind(kind, seed)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 200, (40,), generator=generator)
    ranges = {"starts": starts, "ends": starts + torch.randint(0, 300, (40,), generator=generator)}
    options = {**ranges, "powers_of_two": seed % 2 == 0, "use_relu": seed != 3}
    expected = quantised_indexer(*inputs, 30, **options, backend="reference")
    for backend in ("cpu", "chunked"):
        assert torch.equal(quantised_indexer(*inputs, 30, **options, backend=backend), expected)


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.full), 2])
def test_threads_and_sizes_decide_nothing(threads, monkeypatch):
    inputs = indexer_inputs(1, 300, heads=64, dim=128, dtype=torch.bfloat16)
    expected = quantised_indexer(*inputs, 40, backend="reference")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(quantised_indexer(*inputs, 40, backend="cpu"), expected)
        # Minimal products, slabs of seven rows, and three gathered rows of 128 columns.
        monkeypatch.setattr(cpu_indexer, "_PRODUCT_ELEMENTS", 4096)
        monkeypatch.setattr(chunked_indexer, "_SLAB_BYTES", 7 * 300 * 52)
        monkeypatch.setattr(quantised_cpu, "_GATHERED", 3 * 128)
        for backend in ("cpu", "chunked"):
            assert torch.equal(quantised_indexer(*inputs, 40, backend=backend), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_context_parallel_rows_equal_the_whole(backend):
    inputs = indexer_inputs(1, 64)
    whole = quantised_indexer(*inputs, 8, backend=backend)
    # Rank 1 of 4 in zigzag order: chunks 1 and 6 of 8, all keys.
    rows = torch.cat([torch.arange(8, 16), torch.arange(48, 56)])
    part = quantised_indexer(
        inputs.query[:, rows], inputs.key, inputs.weights[:, rows], 8, ends=rows + 1, backend=backend
    )
    assert torch.equal(part, whole[:, rows])


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_and_no_keys(backend):
    inputs = indexer_inputs(1, 20)
    # topk is larger than the number of keys: row i lists keys 0 to i, then -1.
    expected = torch.arange(20).expand(20, 20).tril() - torch.ones(20, 20).triu(1)
    assert torch.equal(quantised_indexer(*inputs, 512, backend=backend)[0], expected.int())
    nothing = [x[:, :0] for x in inputs]
    assert quantised_indexer(*nothing, 4, backend=backend).shape == (1, 0, 0)
    without_keys = (inputs.query, inputs.key[:, :0], inputs.weights)
    ends = torch.zeros(20, dtype=torch.int32)
    assert quantised_indexer(*without_keys, 4, ends=ends, backend=backend).shape == (1, 20, 0)


def test_fp64_is_rounded_to_fp32_and_nothing_has_a_gradient():
    inputs = [x.double().requires_grad_() for x in indexer_inputs(1, 30, heads=3)]
    found = quantised_indexer(*inputs, 5)
    assert torch.equal(found, quantised_indexer(*(x.float() for x in inputs), 5, backend="reference"))
    assert not found.requires_grad


def test_strided_inputs_in_megatron_layout():
    inputs = indexer_inputs(2, 30)
    # [sequence, batch, ...] memory seen as [batch, sequence, ...]
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    assert torch.equal(quantised_indexer(*strided, 6), quantised_indexer(*inputs, 6, backend="reference"))


# -- errors ------------------------------------------------------------------------------------


def test_what_does_not_fit_is_named():
    query, key, weights = indexer_inputs(1, 10)
    with pytest.raises(ValueError, match="quantised_indexer: topk must be at least 1, got 0"):
        quantised_indexer(query, key, weights, 0)
    with pytest.raises(ValueError, match=r"quantised_indexer: key must be \[1, key_length, 16\]"):
        quantised_indexer(query, key[..., :8], weights, 4)
    with pytest.raises(ValueError, match="quantised_indexer: head_dim must be at most 131072, got 131073"):
        quantised_indexer(torch.ones(1, 1, 1, 131073), torch.ones(1, 1, 131073), torch.ones(1, 1, 1), 1)


def test_no_backend_selects_so_on_npus():
    shape = ShapeClass("npu", torch.bfloat16, (("heads", 64), ("head_dim", 128), ("topk", 2048)))
    for backend, reason in (("npu", "no npu implementation"), ("chunked", "npu_quant_lightning_indexer")):
        with pytest.raises(BackendUnavailable, match=reason):
            choose("quantised_indexer", backend, shape)
    with pytest.raises(BackendUnavailable, match="no backend can run"):
        choose("quantised_indexer", "auto", shape)
