"""The global gradient norm without Apex: bit-identical to Megatron's, without host reads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mindspeed_dsa
from mindspeed_dsa import platforms, session
from mindspeed_dsa.features.platform.without_apex import feature, functions

pytest.importorskip("megatron.core")


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def gradients(parameters: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(parameters)
    return [
        # Magnitudes from 10^-3 to 10^3.
        torch.randn(1 + 7 * number, 1 + number % 5, generator=generator) * 10 ** (number % 7 - 3)
        for number in range(parameters)
    ]


@pytest.mark.parametrize("parameters", [1, 35])
def test_same_norm_without_reading(parameters):
    from megatron.core.optimizer import clip_grads

    theirs = clip_grads.l2_norm_impl
    grads = gradients(parameters)
    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        assert clip_grads.l2_norm_impl is not theirs
        with Reads() as reads:
            norm, none = clip_grads.l2_norm_impl(2048 * 32, torch.zeros(1), [grads], False)
        assert none is None
        assert reads.count == 0
        with Reads() as reads:
            expected, _ = theirs(2048 * 32, torch.zeros(1), [grads], False)
        assert reads.count >= 1  # one read here; on a device, one per parameter
    assert norm.dtype == expected.dtype
    assert torch.equal(norm, expected)
    assert clip_grads.l2_norm_impl is theirs


def test_what_is_not_on_the_jobs_device_is_megatrons():
    left: list[Any] = []

    def theirs(chunk_size: int, noop_flag: Any, tensor_lists: Any, *args: Any) -> Any:
        left.append((chunk_size, tensor_lists, args))
        return "theirs", None

    norm, flag = functions.norm_on_device(theirs), torch.zeros(1, dtype=torch.int32)
    # On several devices, without gradients, or with the flag elsewhere.
    on_both = [[torch.ones(2), torch.ones(2, device="meta")]]
    on_host = [[torch.ones(2)], [torch.ones(3)]]
    assert norm(4, flag, on_both, False) == ("theirs", None)
    assert norm(4, flag, [[]], False) == ("theirs", None)
    assert norm(4, flag.to("meta"), on_host, False) == ("theirs", None)
    assert left == [(4, on_both, (False,)), (4, [[]], (False,)), (4, on_host, (False,))]
    half, _ = norm(4, flag, [[torch.full((9,), 2.0, dtype=torch.bfloat16)], [torch.ones(13)]], False)
    assert half.dtype == torch.float32
    # 9 x 2^2 + 13 = 7^2.
    assert half.tolist() == [7.0]


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_number_that_is_not_finite_is_told(number):
    flag, grads = torch.zeros(1, dtype=torch.int32), [torch.ones(3), torch.tensor([[1.0, number]])]
    norm, _ = functions.norm_on_device(pytest.fail)(4, flag, [grads], False)
    assert str(norm.item()) == str(number)


@pytest.mark.parametrize("library", ["transformer_engine", "amp_C"])
def test_off_where_a_library_has_kernels(monkeypatch, library):
    installed = {library}
    monkeypatch.setattr(feature, "find_spec", lambda name: name if name in installed else None)
    assert not feature.has_no_norm_kernel(None)
    installed.clear()
    assert feature.has_no_norm_kernel(None)


@pytest.mark.parametrize(("installed", "on"), [((), ["local-modules"]), (("amp_C", "apex"), [])])
def test_a_gpu_has_nothing_else_that_nobody_switched_on(monkeypatch, installed, on):
    monkeypatch.setattr(platforms, "detect", lambda requested: "cuda")
    monkeypatch.setattr(feature, "find_spec", lambda name: name if name in installed else None)
    _, active = session.resolve({}, ["train.py"], complete=False)
    assert [each.name for each in active] == on
