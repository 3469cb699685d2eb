"""The GPU for which kernels are compiled, fallbacks where compilation fails, and messages between ranks."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from mindspeed_dsa import log
from mindspeed_dsa.ops import indexer_kl_loss as public_loss
from mindspeed_dsa.ops.backend import BackendUnavailable, ShapeClass, choose
from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss, divergence_and_score_gradient
from tests.ops.random_inputs import indexer_inputs, packed_ranges
from tests.ops.triton_backend import DEVICE, common, hopper, kl_loss

SIZES = {
    "lightning_indexer": (("heads", 64), ("head_dim", 128), ("topk", 2048)),
    "sparse_flash_attention": (("heads", 16), ("dim", 576), ("value_dim", 512), ("topk", 2048)),
    "indexer_kl_loss": (
        *(("heads", 16), ("dim", 576), ("key_heads", 1), ("index_heads", 64), ("index_dim", 128)),
        ("topk", 2048),
    ),
}
# By operator, the last kernel that it launches.
LATE = {
    "lightning_indexer": "score_gradients_kernel",
    "sparse_flash_attention": "backward_query_kernel",
    "indexer_kl_loss": "divergence_kernel",
}
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="pretends that there are GPUs")


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    """Pretend that the current GPU is an old one and the other one a Hopper; nothing is launched."""
    capabilities = {None: (7, 5), 0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capabilities[index])
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(logging.getLogger(log.NAME), "propagate", True)
    choose.cache_clear()
    log.forget()
    yield
    choose.cache_clear()
    log.forget()


@pytest.fixture
def compiler(monkeypatch):
    """Collect the kernels to compile; those in ``broken`` fail to compile."""
    state = SimpleNamespace(kernels=[], broken=set())

    def warmup(self, *args, grid, **constants):
        state.kernels.append(self.__name__)
        if self.__name__ in state.broken:
            raise RuntimeError("ptxas exited with code 1\n  registers: too many")
        return SimpleNamespace(run="loaded")

    monkeypatch.setattr(common, "interpreted", lambda: False)
    monkeypatch.setattr(InterpretedFunction, "warmup", warmup)
    return state


@pytest.mark.parametrize("operator", SIZES)
def test_the_gpu_of_the_tensors_is_asked_not_the_current_one(operator):
    on_old, on_hopper = (ShapeClass("cuda", torch.bfloat16, SIZES[operator], index) for index in (0, 1))
    assert choose(operator, "auto", on_hopper).__name__.endswith(f"{operator}.triton")
    assert choose(operator, "auto", on_old).__name__.endswith(f"{operator}.chunked")
    assert ShapeClass.of(torch.empty(1, device="meta"), ("heads", 3)).index is None


def test_plain_kernels_on_hopper_are_warned_of(compiler, monkeypatch, caplog):
    """The warning names the Triton releases that compile the kernels for Hopper."""
    monkeypatch.setattr(hopper, "HAS_GLUON", False)
    monkeypatch.setattr(hopper.triton, "__version__", "3.6.0")
    for index, messages in ((0, 0), (1, 1), (1, 1)):
        shape = ShapeClass("cuda", torch.bfloat16, SIZES["sparse_flash_attention"], index)
        choose("sparse_flash_attention", "auto", shape)
        found = [record.getMessage() for record in caplog.records if "plain Triton" in record.getMessage()]
        assert len(found) == messages
    assert "need triton 3.7 to 3.9, and 3.6.0 is installed" in found[0]


@pytest.mark.parametrize("operator", SIZES)
def test_everything_is_compiled_when_a_backend_is_chosen(operator, compiler):
    shape = ShapeClass("cuda", torch.bfloat16, SIZES[operator], 1)
    assert choose(operator, "auto", shape).__name__.endswith(f"{operator}.triton")
    expected = {
        "lightning_indexer": {"score_slab_kernel", "select_kernel", "scores_at_kernel"},
        "sparse_flash_attention": {
            *("forward_kernel", "attention_sum_kernel", "delta_kernel", "backward_keys_kernel"),
            "add_rows_by_key_kernel",
        },
        "indexer_kl_loss": {"forward_kernel", "attention_sum_kernel"},
    }[operator]
    assert set(compiler.kernels) - {"row_lengths_kernel", "add_rows_by_key_kernel"} == {
        *(expected - {"add_rows_by_key_kernel"}),
        LATE[operator],
    }
    count = len(compiler.kernels)
    choose(operator, "auto", shape)
    choose(operator, "triton", shape)
    choose(operator, "triton", shape)
    assert len(compiler.kernels) == 2 * count, "once for each request"


@pytest.mark.parametrize("operator", SIZES)
def test_a_kernel_that_does_not_compile_is_known_before_the_first_step(operator, compiler, caplog):
    compiler.broken.add(LATE[operator])
    shape = ShapeClass("cuda", torch.bfloat16, SIZES[operator], 1)
    with caplog.at_level(logging.WARNING, logger=log.NAME):
        for _ in range(2):
            assert choose(operator, "auto", shape).__name__.endswith(f"{operator}.chunked")
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    reason = (
        f"its {LATE[operator]} does not compile for compute capability 9.0 "
        "(ptxas exited with code 1 registers: too many)"
    )
    assert record.getMessage().endswith(reason)
    with pytest.raises(BackendUnavailable) as error:
        choose(operator, "triton", shape)
    assert reason in str(error.value)
    assert "--dsa-backend" in str(error.value)


def test_the_divergence_in_the_backward_is_one_launch(monkeypatch):
    # On a GPU, PyTorch's form would launch about 20 kernels per block of entries.
    launched = []
    before = InterpretedFunction.__getitem__
    monkeypatch.setattr(
        InterpretedFunction, "__getitem__", lambda self, grid: launched.append(grid) or before(self, grid)
    )
    scores, target = torch.randn(2, 33, 9), torch.rand(2, 33, 9)
    indices = torch.arange(9).expand(2, 33, 9).int()
    expected = divergence_and_score_gradient(scores, target, indices, backend="cpu")
    assert launched == []
    found = divergence_and_score_gradient(scores, target, indices, backend="triton")
    assert launched == [(66,)]
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other)
    on_gpu = SimpleNamespace(
        is_cuda=True, device=torch.device("cuda", 1), dtype=torch.float32, shape=scores.shape
    )
    assert public_loss._closed_form(on_gpu, "auto") is kl_loss.divergence_and_gradient


@pytest.mark.parametrize("ranges", [pytest.param("causal", marks=pytest.mark.full), "packed"])
def test_ranks_are_sent_nothing_that_nobody_wrote(ranges, monkeypatch):
    # Fresh memory holds NaN, so sending it would show. Causal rows do not send the keys behind them.
    rows = 40
    index = [x.requires_grad_() for x in indexer_inputs(1, rows)]
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, rows, 3, 24, generator=generator)
    key = torch.randn(1, rows, 24, generator=generator)
    starts, ends = packed_ranges(7, 21, 4) if ranges == "packed" else (None, None)
    if starts is not None:
        # The last rows see no key.
        starts, ends = (torch.cat([x, torch.zeros(8, dtype=torch.int32)]) for x in (starts, ends))
    sent = []

    def all_reduce(tensor, group):
        assert tensor.isfinite().all()
        assert tensor.is_contiguous()
        sent.append(tensor.numel())

    monkeypatch.setattr(kl_loss.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(kl_loss, "slab_rows", lambda *lengths: 16)

    def loss(backend, group):
        result = dense_indexer_kl_loss(
            *index, query, key, 0.3, starts=starts, ends=ends, tp_group=group, backend=backend
        )
        return result, *torch.autograd.grad(result, index)

    expected = loss("reference", None)
    alone, with_others = loss("triton", None), loss("triton", "two ranks, of which the other has no heads")
    assert sent == ([16 * 16, 16 * 32, 8 * 40] if ranges == "causal" else [16 * 40, 16 * 40, 8 * 40])
    for mine, other, value in zip(alone, with_others, expected, strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, value, atol=1e-5, rtol=1e-4)
