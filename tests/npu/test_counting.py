"""The counter itself: it counts events of the device, but not the host's work on its own tensors."""

from __future__ import annotations

import pytest
import torch

from tests.npu.counting import counted


def test_reads_are_seen_in_every_form():
    device = torch.arange(6)
    forms = {
        "cpu": lambda: device.cpu(),
        "to": lambda: device.to("cpu"),
        "tolist": lambda: device.tolist(),
        "numpy": lambda: device.numpy(),
        "_local_scalar_dense": lambda: bool((device > 3).all()),
        "nonzero": lambda: device.nonzero(),
        "index by a mask": lambda: device[device > 2],
        "equal": lambda: torch.equal(device, device + 0),
        "repeat_interleave": lambda: torch.repeat_interleave(device),
    }
    for what, read in forms.items():
        with counted() as counts:
            read()
        assert what in [event.what for event in counts.host_reads], what
        assert counts.host_reads[0].where.startswith("tests/npu/test_counting.py:"), what


def test_tensors_of_the_host_are_read_for_nothing():
    device = torch.arange(6)
    with counted() as counts:
        facts = (device + 1).cpu()
        assert facts.tolist() == [1, 2, 3, 4, 5, 6]
        assert (facts == torch.arange(1, 7)).all()
        assert torch.tensor([3, 1]).cumsum(0).tolist() == [3, 4]
        assert facts[facts > 2].sum().item() == 18
        assert torch.arange(4).sort().values.tolist() == [0, 1, 2, 3]
    assert [event.what for event in counts.host_reads] == ["cpu"], counts.told("host_reads")
    assert counts.ai_cpu == []


def test_what_goes_to_the_device():
    device = torch.arange(6)
    with counted() as counts:
        numbers = torch.tensor([5, 6], device=device.device)
        moved = torch.arange(2).to(device.device)
        assert (numbers + moved).sum().item() == 12
    assert [event.what for event in counts.uploads] == ["tensor", "to"]
    # A sum of two tensors of the device is one of the device.
    assert [event.what for event in counts.host_reads] == ["_local_scalar_dense"]


@pytest.mark.parametrize(
    ("what", "call", "ours"),
    [
        ("sort", lambda x: x.int().sort(), lambda x: x.float().sort()),
        ("cumsum", lambda x: x.cumsum(0), lambda x: x.int().cumsum(0, dtype=torch.int32)),
        ("cumsum", lambda x: (x > 2).cumsum(0), lambda x: (x > 2).cumsum(0, dtype=torch.int32)),
        ("searchsorted", lambda x: torch.searchsorted(x, x), lambda x: x * 2),
        ("floor_divide", lambda x: x // 3, lambda x: x.int() // 3),
        ("div", lambda x: torch.div(x, 3, rounding_mode="floor"), lambda x: x / 3),
    ],
)
def test_work_of_the_ai_cpu(what, call, ours):
    device = torch.arange(6)
    with counted() as counts:
        call(device)
    assert [event.what for event in counts.ai_cpu] == [what]
    with counted() as counts:
        ours(device)
    assert counts.ai_cpu == [], counts.told("ai_cpu")


def test_copies_and_fp64():
    device = torch.randn(8, 4, requires_grad=True)
    with counted(smallest_copy=64) as counts:
        joined = torch.cat([device.t().contiguous(), device.t()[:1]])
        small = torch.zeros(3, device=device.device).clone()
        # In a backward pass too.
        (joined.double().sum() + small.sum()).backward()
    assert [event.what for event in counts.copies if event.shape == (5, 8)][:2] == ["cat", "_to_copy"]
    assert counts.copies[0].what == "clone"
    assert counts.copies[0].bytes == 128
    assert all(event.bytes >= 64 for event in counts.copies)
    assert {"_to_copy", "sum"} <= {event.what for event in counts.doubles}


def test_inside_of_torch_npus_operators_nothing_counts(npu_kernels):
    query, key = torch.randn(1, 40, 8, 128).bfloat16(), torch.randn(1, 40, 1, 128).bfloat16()
    with counted() as counts:
        torch.ops.npu.npu_lightning_indexer(query, key, query[..., 0].contiguous(), return_value=True)
    assert npu_kernels
    assert (counts.host_reads, counts.ai_cpu) == ([], [])
    # Ours, before the call.
    assert [event.what for event in counts.copies] == ["clone"]
