"""Transfers reuse the memory of earlier ones."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.parallel import buffer_pool


@pytest.fixture(autouse=True)
def nothing_else_in_the_pool(monkeypatch):
    monkeypatch.setattr(buffer_pool, "_buffers", [])


def test_what_is_given_back_is_taken_again_in_another_shape():
    first = buffer_pool.take(torch.empty(6, 4))
    other = buffer_pool.take(torch.empty(6, 4))
    assert first.data_ptr() != other.data_ptr()
    buffer_pool.give_back(first)
    assert buffer_pool.take(torch.empty(24), torch.float64).data_ptr() != first.data_ptr()
    again = buffer_pool.take(torch.empty(4, 6))
    assert again.data_ptr() == first.data_ptr()
    assert again.shape == (4, 6)


def test_training_writes_to_memory_after_an_evaluation_in_inference_mode():
    with torch.inference_mode():
        buffer_pool.give_back(buffer_pool.take(torch.empty(8)))
    buffer_pool.take(torch.empty(8)).zero_()
