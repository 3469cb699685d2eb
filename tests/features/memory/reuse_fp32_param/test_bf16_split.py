from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_dsa.features.memory.reuse_fp32_param.bf16_split import join, split
from mindspeed_dsa.features.memory.reuse_fp32_param.shared_storage import (
    InPlaceStorage,
    OverBucketStorage,
    SharedStorage,
)

# Lower halves around ties (0x8000) and at both ends.
LOW = (0x0000, 0x0001, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF)
SPECIAL = (
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x00008000),
    *(0x00018000, 0x80008000, 0x80018000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000),
    *(0xFF800000, 0x7F800001, 0xFF808000, 0x7F808001, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF),
    *(0x7FBFFFFF, 0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x3F80FFFF, 0x3F7FFFFF, 0x7F818000),
)


def numbers(bits: Tensor) -> Tensor:
    """Return float32 numbers of 32-bit patterns in int64."""
    return bits.to(torch.int32).view(torch.float32)


def every_upper_half() -> Tensor:
    """Return all 2^16 upper halves combined with each special lower half."""
    high = torch.arange(2**16, dtype=torch.int64) << 16
    return numbers(torch.cat([high | low for low in LOW]))


def shuffled(count: int, seed: int = 0) -> Tensor:
    """Return random bit patterns with many ties and special values."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2**32, (count,), generator=generator)
    kind = torch.randint(0, 4, (count,), generator=generator)
    # Exactly between two bf16 numbers.
    ties = (bits & ~0xFFFF) | 0x8000
    special = torch.tensor(SPECIAL)[bits % len(SPECIAL)]
    return numbers(torch.where(kind == 0, ties, torch.where(kind == 1, special, bits)))


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


def assert_rounded(weight: Tensor, words: Tensor) -> None:
    """Check that the weight is torch's rounding, with NaN for NaN."""
    nan = words.isnan()
    assert torch.equal(weight.isnan(), nan)
    assert torch.equal(weight.view(torch.int16)[~nan], words.to(torch.bfloat16).view(torch.int16)[~nan])


def nearest_even(bits: int) -> int:
    """Round to nearest even with integers, by definition; not for NaN."""
    down, rest = bits >> 16, bits & 0xFFFF
    return down + (rest > 0x8000 or (rest == 0x8000 and down % 2 == 1))


def test_all_upper_halves_with_special_lower_halves():
    words = every_upper_half()
    parts = split(words)
    assert_rounded(parts.weight, words)
    assert_same_bits(join(parts), words)


def test_the_weight_is_the_nearest_bfloat16_and_ties_are_even():
    words = every_upper_half()
    finite = words[~words.isnan()]
    patterns = (finite.view(torch.int32).to(torch.int64) & 0xFFFFFFFF).tolist()
    expected = torch.tensor([nearest_even(bits) for bits in patterns])
    actual = split(finite).weight.view(torch.int16).to(torch.int64) & 0xFFFF
    assert torch.equal(actual, expected)


def test_a_nan_of_arithmetic_keeps_its_bits_without_being_listed():
    # Quiet NaNs, whose upper half is a NaN in bf16, too.
    words = numbers(torch.tensor([0x7FC00000, 0xFFC00000, 0x7FC08000, 0xFFFF7FFF]))
    parts = split(words)
    assert parts.weight.isnan().all()
    assert parts.where.numel() == 0
    assert_same_bits(join(parts), words)


def test_of_a_tie_only_the_half_that_was_rounded_up_is_listed():
    words = numbers(torch.tensor([0x3F808000, 0x3F818000, 0x3F817FFF, 0x3F818001]))
    # 0x3F81 is odd, so its tie rounds up; 0x3F80 is even and keeps its tie.
    assert split(words).where.tolist() == [1]


def test_about_one_in_131072_is_listed():
    words = torch.empty(2**23).uniform_(1, 2, generator=torch.Generator().manual_seed(1))
    # One in 2^17 of 2^23 words: 2^6.
    assert split(words).where.numel() == pytest.approx(2**6, abs=32)  # four standard deviations


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
@settings(deadline=None)
def test_any_bits(bits):
    words = numbers(torch.tensor(bits))
    parts = split(words)
    assert_rounded(parts.weight, words)
    assert_same_bits(join(parts), words)


def in_place(numel: int, block: int | None) -> SharedStorage:
    return InPlaceStorage(numel, "cpu", block)


def over_bucket(rank: int, size: int):
    def make(numel: int, block: int | None) -> SharedStorage:
        return OverBucketStorage(torch.zeros(size * numel, dtype=torch.bfloat16), rank, size, block)

    return make


STORAGES = {
    "in place": in_place,
    **{
        f"over bucket, {rank} of {size}": over_bucket(rank, size)
        for size in (2, 3, 4)
        for rank in range(size)
    },
}

QUICK = (1, 7, 64, 65)
# A float32 starts at an even position, so the last of an odd number of odd shards has no room.
FORMS = [
    pytest.param(
        make,
        numel,
        id=f"{name}, {numel}",
        marks=() if numel in QUICK or (numel, name) == (250, "over bucket, 1 of 3") else pytest.mark.full,
    )
    for name, make in STORAGES.items()
    for numel in (1, 2, 7, 16, 63, 64, 65, 250)
    if name != "over bucket, 2 of 3" or numel % 2 == 0
]


@pytest.mark.parametrize("numel", [1, 7, 65])
def test_the_last_of_an_odd_number_of_odd_shards_is_refused(numel):
    with pytest.raises(ValueError, match="no even position"):
        over_bucket(2, 3)(numel, None)


def assert_same_weights(found, expected):
    """Check for bit equality except in NaN, whose bits depend on the processor's conversion."""
    numbers = ~expected.isnan()
    assert torch.equal(~found.isnan(), numbers)
    assert torch.equal(found.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


@pytest.mark.parametrize(("make", "numel"), FORMS)
def test_forms_change_back_and_forth_whatever_the_block(make, numel):
    words = shuffled(numel)
    whole = split(words)
    for block in (1, 2, 3, 8, 64, None):
        storage = make(numel, block)
        storage.write(0, words)
        for turn in range(3):
            assert_same_weights(storage.weights, whole.weight)
            assert_same_bits(storage.read(0, numel), words)
            storage.to_master()
            assert_same_bits(storage.master, words)
            # Reading must work in master form as well.
            assert_same_bits(storage.read(0, numel), words)
            if turn == 1:  # new numbers, as after a step
                words = shuffled(numel, seed=turn)
                whole = split(words)
                storage.master.copy_(words)
            storage.to_pairs()


@pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
def test_parts_are_read_and_written_without_the_rest(make):
    words = shuffled(100)
    storage = make(100, 16)
    storage.write(0, words)
    for start, end in ((0, 1), (5, 40), (15, 17), (16, 32), (90, 100), (50, 50)):
        fresh = shuffled(end - start, seed=start)
        words[start:end] = fresh
        storage.write(start, fresh)
        assert_same_bits(storage.read(0, 100), words)
        assert_same_bits(storage.read(start, end), fresh)
    storage.to_master()
    assert_same_bits(storage.master, words)


@pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
def test_dropping_lower_halves_leaves_the_weights(make):
    storage = make(100, 16)
    storage.write(0, shuffled(100))
    weights = storage.weights.clone()
    storage.drop_lower_halves()
    assert storage._listed == {}
    assert_same_bits(storage.read(0, 100), weights.float())
    storage.to_master()
    assert_same_bits(storage.master, weights.float())


def test_the_shard_of_every_even_world_begins_at_a_float32():
    for size in (2, 4, 6):
        for rank in range(size):
            # Three numbers per shard: with an even number of ranks every shard still has an even position.
            storage = OverBucketStorage(torch.zeros(size * 3, dtype=torch.bfloat16), rank, size, 2)
            words = shuffled(3)
            storage.write(0, words)
            storage.to_master()
            assert_same_bits(storage.master, words)
            storage.to_pairs()
            assert_same_bits(storage.read(0, 3), words)


def test_in_pair_form_other_shards_are_not_touched():
    bucket = torch.full((4 * 32,), 3.0, dtype=torch.bfloat16)
    storage = OverBucketStorage(bucket, 1, 4, 8)
    storage.write(0, shuffled(32))
    storage.drop_lower_halves()
    storage.read(0, 32)
    assert (bucket[:32] == 3).all()
    assert (bucket[64:] == 3).all()


def test_storage_is_four_bytes_a_number_or_two_beside_the_bucket():
    storage = InPlaceStorage(1000, "cpu")
    assert storage.master.untyped_storage().nbytes() == 4000
    assert storage.weights.untyped_storage().data_ptr() == storage.master.untyped_storage().data_ptr()
    bucket = torch.zeros(2000, dtype=torch.bfloat16)
    shard = OverBucketStorage(bucket, 0, 2)
    assert shard._low(0, 1000).untyped_storage().nbytes() == 2000
    assert shard.master.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()


def test_writing_in_the_middle_of_a_step_is_refused():
    storage = InPlaceStorage(4, "cpu")
    storage.to_master()
    with pytest.raises(RuntimeError, match="in the middle of an optimizer step"):
        storage.write(0, torch.ones(4))


class Saturating(TorchDispatchMode):
    """Device whose conversions to int16 saturate, because CANN's manuals do not promise wrapping."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.int16:
            args = (args[0].clamp(-(2**15), 2**15 - 1), *args[1:])
        return function(*args, **kwargs)


def test_nothing_hangs_on_how_a_device_narrows_integers():
    words = shuffled(4096)
    with Saturating():
        halves = split(words)
        joined = join(halves)
    plain = split(words)
    assert all(
        torch.equal(one.view(torch.int16), other.view(torch.int16))
        for one, other in zip(halves[:2], plain[:2], strict=True)
    )
    assert len(halves.where) == len(plain.where), "a number more in the list costs ten bytes"
    assert_same_bits(joined, words)
