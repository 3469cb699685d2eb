"""Selections by FP8 scores in Triton, interpreted or on a GPU, against DeepSeek's formulas."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.quantised_indexer import arithmetic, quantised_indexer
from mindspeed_dsa.ops.triton.launch import rehearsal
from tests.ops import engine_formulas
from tests.ops.random_inputs import indexer_inputs, packed_ranges, tied_inputs
from tests.ops.test_lightning_indexer import causal
from tests.ops.triton_backend import DEVICE, quantised


def run(inputs, topk, **options):
    on_device = [x.to(DEVICE) for x in inputs]
    return quantised_indexer(*on_device, topk, backend="triton", **options).cpu()


@pytest.fixture(params=["e4m3", "bf16"])
def operands(request, monkeypatch):
    """Return the operand format: e4m3, or bf16 as on GPUs before compute capability 8.9."""
    dtype = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}[request.param]
    if request.param == "bf16":
        monkeypatch.setattr(quantised, "operand_dtype", lambda *_: dtype)
    elif quantised.operand_dtype(torch.device(DEVICE), 128) != dtype:
        pytest.skip("this GPU does not multiply e4m3")
    return request.param


@pytest.mark.parametrize("ue8m0", [True, False])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)]
)
def test_selections_are_those_of_the_formulas(operands, dtype, ue8m0):
    inputs = indexer_inputs(1, 24, heads=16, dim=64, dtype=dtype)
    starts, ends = packed_ranges(7, 17)
    expected = engine_formulas.selection(inputs, 6, starts, ends, ue8m0)
    assert torch.equal(run(inputs, 6, powers_of_two=ue8m0, starts=starts, ends=ends), expected)


def test_ties_go_to_the_lower_position(operands):
    inputs = tied_inputs(batch=1, rows=24, dim=32)
    assert torch.equal(run(inputs, 5), engine_formulas.selection(inputs, 5, *causal(24), True))


def test_keys_that_are_chosen_otherwise_are_near_the_last_one(operands):
    # Inexact sums may swap keys whose scores are closer than the error bound.
    inputs = indexer_inputs(1, 4, 600, heads=64, dim=128, dtype=torch.bfloat16)
    ends = torch.tensor([200, 411, 598, 600])
    exact = engine_formulas.selection(inputs, 64, torch.zeros(4), ends, True)
    topk_indices = run(inputs, 64, ends=ends)
    query, of_query = arithmetic.quantise(inputs.query, True)
    key, of_key = arithmetic.quantise(inputs.key, True)
    weights = inputs.weights.float() * of_query
    bound = arithmetic.largest_difference(
        query, weights, arithmetic.longest_key(key, of_key), float(of_key.max())
    )
    # Tensor cores keep at least 13 bits of the accumulator: 2^24 / 2^13 = 2^11.
    bound = bound if DEVICE == "cpu" else bound * 2**11
    scores = engine_formulas.scores(*inputs, True)
    last = scores.gather(-1, exact.long()).amin(-1)
    assert ((scores.gather(-1, topk_indices.long()).amin(-1) - last).abs() <= 2 * bound).all()


@pytest.mark.usefixtures("operands_that_are_no_numbers")
def test_keys_that_are_no_numbers_come_last(operands):
    inputs = [x.clone() for x in indexer_inputs(1, 16, heads=16, dim=32)]
    inputs[1][0, 2], inputs[1][0, 5, 3] = torch.nan, torch.inf
    assert torch.equal(run(inputs, 4), engine_formulas.selection(inputs, 4, *causal(16), True))


@pytest.mark.parametrize("ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_and_factors_are_those_of_pytorch(operands, dtype, ue8m0):
    # Bit for bit, with subnormal e4m3 numbers, ties between steps, any strides, and odd widths.
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-6, 3, (2, 7, 5, 48), generator=generator)
    rows = torch.randn(2, 7, 5, 48, generator=generator) * 10.0**exponents
    halves = torch.arange(48) + 0.5
    rows[0, 0], rows[1, 6], rows[0, 3, 1, 2], rows[1, 2, 3, 4] = 0.0, halves, torch.nan, -torch.inf
    rows = rows.to(dtype).transpose(1, 2)
    for operand in (rows, rows[1], rows[:, 0, :, :33]):
        kind = torch.float8_e4m3fn if operands == "e4m3" else torch.bfloat16
        numbers, factors = quantised.quantise(operand.to(DEVICE), ue8m0, kind)
        expected, of_rows = arithmetic.quantise(operand, ue8m0)
        assert numbers.dtype == kind
        assert torch.equal(factors.cpu().nan_to_num(-1.0), of_rows.nan_to_num(-1.0))
        finite = ~of_rows.isnan()
        assert torch.equal(numbers.cpu().float()[finite], expected[finite])


@pytest.mark.parametrize(
    ("capability", "dim", "dtype"),
    [
        (80, 128, torch.bfloat16),
        (89, 128, torch.float8_e4m3fn),
        (90, 128, torch.float8_e4m3fn),
        (120, 32, torch.float8_e4m3fn),
        (90, 16, torch.bfloat16),
    ],
)
def test_what_a_gpu_multiplies(capability, dim, dtype):
    with rehearsal(capability, lambda _: None):
        assert quantised.operand_dtype(torch.device("meta"), dim) == dtype
