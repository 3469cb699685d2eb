"""Weights that are gathered into blocks, through torch_npu's namespace of operators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from mindspeed_dsa.parallel import fsdp2_copy_out, fsdp2_nz

SCHEMA = "npu_special_slice(Tensor self, int dim, int start, int end, Tensor(a!) output) -> ()"


def kernel(self, dim, start, end, output):
    """By the article: it cuts columns, and writes the weight of all ranks' rows block by block."""
    weight = self.narrow(dim, start, end - start).reshape(output.shape)
    *experts, rows, columns = output.shape
    blocks = weight.view(*experts, rows // 16, 16, columns // 16, 16).movedim(-2, -4)
    output.view(blocks.shape).copy_(blocks)


def test_releases_of_torch_npu_lack_the_operator():
    import torch_npu  # noqa: F401

    with pytest.raises(RuntimeError, match=r"^fsdp2: this torch_npu has no npu_special_slice"):
        fsdp2_nz.blocks()


def parameter(shape, ranks, layout=None):
    """What FSDP2 knows of a weight that is cut on its first dimension."""
    sharded = SimpleNamespace()
    if layout is not None:
        fsdp2_copy_out.lay_out(sharded, layout)
    return SimpleNamespace(
        sharded_param=sharded,
        sharded_state=ShardedState.SHARDED,
        fsdp_placement=SimpleNamespace(dim=0),
        padded_sharded_param_size=torch.Size([shape[0] // ranks, *shape[1:]]),
        all_gather_outputs=[torch.empty(torch.Size(shape).numel())],
        _orig_size=torch.Size(shape),
    )


def test_large_weights_are_written_by_the_operator_and_others_split(monkeypatch):
    import torch_npu  # noqa: F401

    shapes = {"norm": (6,), "experts": (4, 32, 48), "rows of blocks are cut": (40, 48), "matrix": (64, 48)}
    monkeypatch.setattr(fsdp2_nz, "SMALLEST", 40 * 48)
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    gathered = torch.cat([each.view(2, -1) for each in whole.values()], 1)
    with torch.library._scoped_library("npu", "FRAGMENT") as library:
        library.define(SCHEMA)
        library.impl("npu_special_slice", kernel, "CPU")
        layout = fsdp2_nz.blocks()
        found = {name: parameter(shape, 2, layout) for name, shape in shapes.items()}
        sizes = [each.numel() // 2 for each in whole.values()]
        fsdp2_copy_out.place(gathered, list(found.values()), sizes)
    for name, each in found.items():
        expected = torch.empty_like(whole[name])
        if name in ("experts", "matrix"):
            kernel(whole[name].view(1, -1), 1, 0, whole[name].numel(), expected)
            assert not torch.equal(expected, whole[name])
        else:
            expected = whole[name]
        assert torch.equal(each.all_gather_outputs[0], expected.flatten())
