"""FP8 block weights against torch's casts: every code, every slice, and back to the same bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dsa.features.checkpoints.hugging_face import fp8
from mindspeed_dsa.runs.files import RunError

CODES = torch.arange(256, dtype=torch.uint8)
# All exponent and mantissa bits set is NaN.
FINITE = CODES[(CODES & 0x7F) != 0x7F]


def every_code(rows: int, columns: int) -> torch.Tensor:
    """Return all finite FP8 codes, repeated in random order."""
    repeated = FINITE.repeat(rows * columns // len(FINITE) + 1)[: rows * columns]
    return repeated[torch.randperm(rows * columns)].view(rows, columns).view(torch.float8_e4m3fn)


def random_factors(shape: tuple[int, int], block: tuple[int, int] = fp8.BLOCK) -> torch.Tensor:
    """Return scales with any mantissa, from 2^-116 to 2^116."""
    exponents = torch.randint(-116, 116, fp8.factors_shape(shape, block)).float()
    return (1 + torch.rand(exponents.shape)) * 2**exponents


def formula(weight: torch.Tensor, factors: torch.Tensor, block: tuple[int, int] = fp8.BLOCK) -> torch.Tensor:
    """Dequantise by the official formula, with torch's cast and scales of the weight's shape."""
    each = factors.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (weight.float() * each[: weight.shape[0], : weight.shape[1]]).bfloat16()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("shape", [(256, 384), (300, 130), (1, 1), (127, 129), (129, 5000), (1000, 7)])
def test_every_finite_code(shape):
    weight, factors = every_code(*shape), random_factors(shape)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    fp8.dequantise(weight, factors, out)
    assert same_bits(out, formula(weight, factors))


def test_nan_stays_nan_and_alone():
    weight = every_code(200, 200).view(torch.uint8)
    weight[3, 150], weight[199, 0] = 0x7F, 0xFF
    weight, factors = weight.view(torch.float8_e4m3fn), random_factors((200, 200))
    out = torch.empty(200, 200, dtype=torch.bfloat16)
    fp8.dequantise(weight, factors, out)
    assert out.isnan().nonzero().tolist() == [[3, 150], [199, 0]]
    expected = formula(weight, factors)
    assert same_bits(out[out.isfinite()], expected[expected.isfinite()])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_slices_are_those_of_the_whole(data):
    block = data.draw(st.sampled_from([(128, 128), (4, 8), (64, 32)]))
    rows, columns = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    bottom, right = data.draw(st.integers(top + 1, rows)), data.draw(st.integers(left + 1, columns))
    weight, factors = every_code(rows, columns), random_factors((rows, columns), block)
    expected = formula(weight, factors, block)[top:bottom, left:right]
    for dtype in (torch.bfloat16, torch.float32):
        # A border around the target stays NaN.
        around = torch.full((bottom - top + 2, right - left + 3), torch.nan, dtype=dtype)
        fp8.dequantise(weight[top:bottom, left:right], factors, around[1:-1, 2:-1], top, left, block)
        assert same_bits(around[1:-1, 2:-1].contiguous(), expected.to(dtype).contiguous())
        assert around.isnan().sum() == around.numel() - expected.numel()


@pytest.mark.parametrize("block", [(128, 128), (4, 8)])
def test_its_own_factors_give_back_the_bytes(block):
    """Dequantised codes quantise to the same bytes with the same scales, subnormals and both zeros
    included.
    """
    for _ in range(3):
        shape = (130, 390)
        weight, factors = every_code(*shape), random_factors(shape, block)
        read = torch.empty(shape, dtype=torch.bfloat16)
        fp8.dequantise(weight, factors, read, block=block)
        again, same = fp8.quantise(read, factors, block)
        assert same is factors
        assert same_bits(again, weight)


def test_chosen_factors():
    """A block's largest magnitude becomes 448; torch rounds the other values to nearest even."""
    weight = torch.randn(260, 200) * torch.logspace(-20, 20, 260)[:, None]
    # A block of zeros has a scale of 1.
    weight[128:256, :128] = 0
    quantised, factors = fp8.quantise(weight)
    assert factors.shape == (3, 2)
    for row in range(3):
        for column in range(2):
            part = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            largest = weight[part].abs().max()
            assert factors[row, column] == (largest / 448 if largest else 1)
            exact = (weight[part] / factors[row, column]).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert same_bits(quantised[part].contiguous(), exact.contiguous())
            assert quantised[part].float().abs().max() == (448 if largest else 0)


def test_chosen_powers_of_two_are_those_of_transformers():
    """Scales are the smallest powers of two that hold the block, also where the maximum is exactly 448 x
    2^n.
    """
    fine = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from transformers import FineGrainedFP8Config

    weight = torch.randn(256, 384) * torch.logspace(-6, 6, 256)[:, None]
    weight[0, 0], weight[:128, 128:256], weight[128:, 128:256] = 2.0**33, 448 * 2.0**-9, 0.0
    theirs = fine.Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config(scale_fmt="ue8m0")))
    expected = theirs._quantize_one("w.weight", weight)
    quantised, factors = fp8.quantise(weight, powers_of_two=True)
    assert factors.tolist() == expected["w.weight_scale_inv"].float().tolist()
    assert factors[0, 1] == 2.0**-9
    assert same_bits(quantised, expected["w.weight"])
    # As in DeepSeek-V3.1: a block that outgrows its scale gets a power of two again.
    again, grown = fp8.quantise(2 * weight, factors, powers_of_two=True)
    # Twice the weights need twice the scales; a block of zeros keeps its scale.
    assert torch.equal(grown, torch.where(factors == 1, factors, 2 * factors))
    assert same_bits(again, quantised)


def test_blocks_that_have_outgrown_their_factors_get_others():
    # Up to half an e4m3 step above 448 x scale, the scale is kept and the value rounds down.
    scales = torch.tensor([[1.0, 1.0], [1.0, 2.0]])
    weight = torch.ones(200, 200)
    weight[0, 0], weight[0, 199] = 463.0, -896.0
    quantised, factors = fp8.quantise(weight, scales)
    assert factors.tolist() == [[1.0, 2.0], [1.0, 2.0]]
    assert scales[0, 1] == 1.0
    assert [quantised[0, 0].float(), quantised[0, 199].float() * 2] == [448.0, -896.0]
    assert quantised[0, 198].float() * 2 == quantised[199, 199].float() * 2 == 1.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("factors", [None, torch.ones(2, 1)])
def test_what_fp8_cannot_hold(value, factors):
    weight = torch.zeros(200, 20, dtype=torch.bfloat16)
    weight[130, 3] = value
    with pytest.raises(RunError, match="rows 128 to 200 hold NaN or infinities"):
        fp8.quantise(weight, factors)


@settings(max_examples=60, deadline=None)
@given(st.integers(-133, 127), st.integers(1, 140), st.integers(1, 140), st.booleans())
def test_what_is_written_can_be_read(exponent, rows, columns, powers):
    """The reader accepts every scale that the writer chooses, for weights of any bf16 magnitude."""
    signs = 1 - 2 * torch.randint(0, 2, (rows, columns))
    weight = ((1 + torch.rand(rows, columns)) * 2.0**exponent * signs).bfloat16()
    weight = weight.clamp(-torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).max)
    try:
        quantised, factors = fp8.quantise(weight, powers_of_two=powers)
    except RunError:
        assert powers
        assert weight.abs().max() > 448 * 2.0**119
        return
    assert fp8.wrong_factor(factors) is None
    back = torch.empty(rows, columns, dtype=torch.bfloat16)
    fp8.dequantise(quantised, factors, back)
    step = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns] * 2.0**-9
    assert back.isfinite().all()
    assert ((back.double() - weight.double()).abs() <= weight.double().abs() * 2.0**-3 + step).all()


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("value", [1e-45, 2.0**-133, 3.3e38, 3.4e38])
def test_the_least_and_the_largest_numbers(value, powers):
    # 1e-45 / 448 is 0 in fp32. 3.3e38 would need a scale of 2^120, and bf16 rounds 3.4e38 to infinity.
    weight = torch.full((3, 3), value)
    if value > 3.35e38 or (powers and value > 1):
        with pytest.raises(RunError, match=r"rows 0 to 3 hold .* numbers beyond 3e\+38, .*export in bf16"):
            fp8.quantise(weight, powers_of_two=powers)
        return
    _, factors = fp8.quantise(weight, powers_of_two=powers)
    assert fp8.wrong_factor(factors) is None
    assert factors[0, 0] >= 2.0**-126


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -0.0, -1.0, 2.0**120])
def test_wrong_factors(value):
    factors = torch.rand(3, 5) + 0.1
    assert fp8.wrong_factor(factors) is None
    factors[2, 1] = value
    assert fp8.wrong_factor(factors) == f"{value} at [2, 1]"


def test_a_factor_of_0_is_kept_with_its_zeros():
    weight = torch.randn(200, 300)
    weight[128:, 256:] = 0
    _, factors = fp8.quantise(weight)
    factors[1, 2] = 0
    quantised, same = fp8.quantise(weight, factors)
    assert same is factors
    assert not quantised[128:, 256:].view(torch.uint8).any()
    # A number that a scale of 0 cannot hold.
    weight[199, 299] = -448.0
    quantised, grown = fp8.quantise(weight, factors)
    assert grown[1, 2] == 1
    assert quantised[199, 299].float() == -448


def test_new_factors_can_be_stored_in_bf16():
    """Each is rounded before numbers are divided by it, so that a reader multiplies by the same."""
    weight = torch.randn(260, 200) * torch.logspace(-10, 10, 260)[:, None]
    quantised, factors = fp8.quantise(weight, factors_dtype=torch.bfloat16)
    assert torch.equal(factors, fp8.quantise(weight)[1].bfloat16().float())
    expanded = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)[:260, :200]
    assert same_bits(quantised, (weight / expanded).clamp(-448, 448).to(torch.float8_e4m3fn))
