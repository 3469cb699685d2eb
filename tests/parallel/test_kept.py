"""Memory of transfers goes from one to the next."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.parallel import kept


@pytest.fixture(autouse=True)
def nothing_else_is_kept(monkeypatch):
    monkeypatch.setattr(kept, "_kept", [])


def test_what_is_given_back_is_taken_again_in_another_shape():
    first = kept.take(torch.empty(6, 4))
    other = kept.take(torch.empty(6, 4))
    assert first.data_ptr() != other.data_ptr()
    kept.give_back(first)
    assert kept.take(torch.empty(24), torch.float64).data_ptr() != first.data_ptr()
    again = kept.take(torch.empty(4, 6))
    assert again.data_ptr() == first.data_ptr()
    assert again.shape == (4, 6)


def test_training_writes_to_memory_after_an_evaluation_in_inference_mode():
    with torch.inference_mode():
        kept.give_back(kept.take(torch.empty(8)))
    kept.take(torch.empty(8)).zero_()
