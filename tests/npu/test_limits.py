"""Calls that the NPU backend declines, and the sentence that says so."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.ops import backend
from mindspeed_dsa.ops.backend import BackendUnavailable, ShapeClass, choose
from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.npu import device as npu_device
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.npu.counting import counted
from tests.npu.selected_indices import causal_indices
from tests.npu.test_indexer_kl_loss import indexer_leaves, main_inputs
from tests.npu.test_lightning_indexer import inputs_of
from tests.npu.test_sparse_flash_attention import SCALE, attention_inputs

SHAPES = {
    "lightning_indexer": {"heads": 64, "head_dim": 128, "topk": 2048},
    "sparse_flash_attention": {"heads": 128, "dim": 576, "value_dim": 512, "topk": 2048},
    "indexer_kl_loss": {
        "heads": 128,
        "dim": 192,
        "key_heads": 128,
        "index_heads": 64,
        "index_dim": 128,
        "topk": 0,
    },
}


# GLM-5's sizes, where they differ; for the attention under any tensor parallelism.
GLM = {
    "lightning_indexer": {"heads": 32},
    "sparse_flash_attention": {"heads": 64},
    "indexer_kl_loss": {"heads": 64, "dim": 256, "key_heads": 64, "index_heads": 32, "topk": 2048},
    "dense_attention": {"heads": 64, "kv_heads": 64, "dim": 256, "value_dim": 256},
}
DEVICES = {"Atlas A2": "Ascend910B3", "Atlas A3": "Ascend910_9391", "Ascend 950": "Ascend950PR_9579"}


def shape_class(operator, device="cpu", dtype=torch.bfloat16, **changes):
    return ShapeClass(device, dtype, tuple({**SHAPES.get(operator, {}), **changes}.items()))


@pytest.mark.parametrize("operator", SHAPES)
def test_shapes_of_the_published_model_are_taken(npu_kernels, operator):
    assert choose(operator, "npu", shape_class(operator)).__name__.endswith(".npu")


@pytest.mark.parametrize("device", [*DEVICES.values(), "of no table"])
@pytest.mark.parametrize("operator", GLM)
def test_shapes_of_glm_are_taken_by_every_product(npu_kernels, monkeypatch, operator, device):
    monkeypatch.setattr("torch.npu.get_device_name", lambda device_=None: device)
    npu_device.product.cache_clear()
    for ranks in (1, 8, 64) if operator == "sparse_flash_attention" else (1,):
        sizes = {**GLM[operator], "heads": GLM[operator]["heads"] // ranks}
        name = getattr(choose(operator, "npu", shape_class(operator, **sizes)), "__name__", ".npu")
        assert name.endswith(".npu")


@pytest.mark.parametrize("operator", SHAPES)
def test_tensors_elsewhere(npu_kernels, operator):
    with pytest.raises(BackendUnavailable, match="runs on NPU tensors only"):
        choose(operator, "npu", shape_class(operator, device="cuda"))


@pytest.mark.parametrize("operator", SHAPES)
def test_npu_tensors_are_taken_as_they_are_in_use(operator):
    """Without the fixture: the users' decision."""
    choose.cache_clear()
    assert choose(operator, "npu", shape_class(operator, device="npu")).__name__.endswith(".npu")
    assert choose(operator, "auto", shape_class(operator, device="npu")).__name__.endswith(".npu")
    with pytest.raises(BackendUnavailable, match="runs on NPU tensors only"):
        choose(operator, "npu", shape_class(operator))


@pytest.mark.parametrize(
    ("operator", "changes", "sentence"),
    [
        ("lightning_indexer", {"dtype": torch.float32}, "bfloat16 and float16 only"),
        ("lightning_indexer", {"head_dim": 64}, "head_dim 128 only"),
        ("lightning_indexer", {"heads": 65}, "at most 64 heads"),
        ("lightning_indexer", {"topk": 2049}, "topk up to 2048 and multiples of 1024 up to 8192"),
        ("lightning_indexer", {"topk": 9216}, "topk up to 2048 and multiples of 1024 up to 8192"),
        ("sparse_flash_attention", {"dtype": torch.float32}, "bfloat16 and float16 only"),
        ("sparse_flash_attention", {"dim": 512}, "512 latent and 64 rotary dimensions only"),
        ("sparse_flash_attention", {"value_dim": 576}, "512 latent and 64 rotary dimensions only"),
        ("sparse_flash_attention", {"heads": 24}, "takes 1, 2, 4, 8, 16, 32, 64 or 128 heads"),
        ("indexer_kl_loss", {"dtype": torch.float32}, "bfloat16 and float16 only"),
        ("indexer_kl_loss", {"dim": 576}, r"heads of 128 \+ 64 dimensions only, and these have 576"),
        ("indexer_kl_loss", {**GLM["indexer_kl_loss"], "topk": 0}, r"128 \+ 64 .* and these have 256"),
        ("indexer_kl_loss", {"key_heads": 1}, "a key for every head, that is, MLA that is not absorbed"),
        ("indexer_kl_loss", {"index_dim": 64}, "index_dim 128 only"),
        ("indexer_kl_loss", {"index_heads": 24}, "takes 8, 16, 32 or 64 index heads"),
    ],
)
def test_limits_of_a_shape(npu_kernels, operator, changes, sentence):
    with pytest.raises(BackendUnavailable, match=sentence):
        choose(operator, "npu", shape_class(operator, **changes))


def _no_operator(self, name):
    raise AttributeError(name)


def test_torch_npu_that_is_missing_broken_or_old(npu_kernels, monkeypatch):
    names = ("npu_lightning_indexer", "npu_no_such_operator")
    assert npu_device.unavailable("cpu", *names[:1]) is None
    assert npu_device.unavailable("cpu", *names) == (
        "torch_npu 2.13.0 has no npu_no_such_operator; no release of torch_npu has npu_no_such_operator"
    )
    monkeypatch.delattr(torch.ops.npu, "npu_lightning_indexer")
    monkeypatch.setattr(type(torch.ops.npu), "__getattr__", _no_operator)
    assert npu_device.unavailable("cpu", *names) == (
        "torch_npu 2.13.0 has no npu_lightning_indexer; npu_lightning_indexer needs torch_npu 2.6.0.post5, "
        "2.7.1.post2, 2.8.0.post2 or 2.9.0 with CANN 8.5.0, or newer ones"
    )

    def broken(name):
        raise ImportError("libascendcl.so: cannot open shared object file")

    monkeypatch.setattr(npu_device, "import_module", broken)
    assert "does not load (libascendcl.so: cannot open" in npu_device.unavailable("cpu")
    monkeypatch.setattr(npu_device, "find_spec", lambda name: None)
    assert npu_device.unavailable("cpu") == "the package 'torch_npu' is not installed"


ZIGZAG = torch.cat([torch.arange(1, 11), torch.arange(31, 41)]).int()
ELSEWHERE = "starts and ends describe other rows"


def indexer_call(backend, **options):
    inputs = inputs_of(20, keys=40)
    return lightning_indexer(*inputs, 12, **{"ends": ZIGZAG, "backend": backend, **options})


def attention_call(backend, indices, heads=2):
    query, key_value = attention_inputs(*indices.shape[:2], 1100, heads)
    return sparse_flash_attention(query, key_value, indices, SCALE, value_dim=512, backend=backend)


def dense_call(backend, heads=32, index_dtype=torch.bfloat16, **options):
    inputs = indexer_leaves(1, 40, dtype=index_dtype)
    query, key = main_inputs(1, 40, heads, torch.bfloat16, per_head=True)
    return dense_indexer_kl_loss(*inputs, query, key, SCALE, backend=backend, **options)


LONG = causal_indices(1, 2, 1100, 1024)
CALLS = {
    "zigzag": (indexer_call, {}, ELSEWHERE),
    "window": (
        indexer_call,
        {"starts": torch.arange(1, 21), "ends": torch.arange(21, 41)},
        ELSEWHERE,
    ),
    "keys-behind": (indexer_call, {"ends": torch.arange(1, 21)}, ELSEWHERE),
    "no-relu": (indexer_call, {"ends": torch.arange(21, 41), "use_relu": False}, "use_relu=True"),
    "pool": (indexer_call, {"ends": torch.arange(21, 41), "pool": 4}, "selects single keys"),
    "width": (attention_call, {"indices": LONG[..., :1000]}, "takes topk 1024, 2048, .* or all keys"),
    "hole": (
        attention_call,
        {"indices": torch.where(torch.arange(1024) == 5, -1, LONG)},
        "some row lists another number of keys",
    ),
    "short-row": (
        attention_call,
        {"indices": torch.where(torch.arange(1024) >= 900, -1, LONG)},
        "some row lists another number of keys",
    ),
    "hidden-keys": (
        attention_call,
        {"indices": torch.where(torch.arange(1024) == 1023, torch.tensor([[1097], [1099]]), LONG).flip(1)},
        "some row lists another number of keys",
    ),
    "many-sequences": (
        attention_call,
        {"indices": LONG[:, :1].expand(257, 1, 1024)},
        "up to 256 sequences",
    ),
    "row-mask": (dense_call, {"row_mask": torch.ones(1, 40, dtype=torch.bool)}, "row_mask must be None"),
    "dense-sink": (dense_call, {"sink": torch.zeros(32)}, "npu_dense_.*has no sink"),
    "dense-heads": (dense_call, {"heads": 16}, "32, 64 or 128 heads, counted over all"),
    "dense-dtypes": (dense_call, {"index_dtype": torch.float16}, "one of them for all inputs"),
    "dense-no-relu": (dense_call, {"use_relu": False}, "use_relu=True"),
    "dense-rows": (
        dense_call,
        {"starts": torch.zeros(40).int(), "ends": torch.full((40,), 40)},
        ELSEWHERE,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_declined(npu_kernels, name):
    call, options, sentence = CALLS[name]
    with pytest.raises(BackendUnavailable, match=f"backend 'npu' cannot run this call: .*{sentence}"):
        call("npu", **options)
    assert not npu_kernels


@pytest.mark.parametrize("name", ["zigzag", "hole", "row-mask"])
def test_auto_falls_back_to_bounded_memory_and_says_so_once(npu_kernels, monkeypatch, caplog, name):
    call, options, sentence = CALLS[name]
    monkeypatch.setattr("mindspeed_dsa.ops.backend.PREFERENCE", {"cpu": backend.PREFERENCE["npu"]})
    before = backend.calls()
    with caplog.at_level(logging.WARNING), counted() as counts:
        results = [call("auto", **options) for _ in range(2)]
    took = backend.calls() - before
    assert {name for _, name in took} == {"chunked"}
    # No operator that an NPU leaves to its processor.
    assert not counts.doubles, counts.told("doubles")
    assert not counts.ai_cpu, counts.told("ai_cpu")
    expected = call("reference", **options)
    assert not npu_kernels
    for result in results:
        torch.testing.assert_close(result, expected)
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "backend 'npu' is skipped" in record.getMessage()
    assert sentence in record.getMessage()


def test_a_wrong_keyword_raises_in_torch_npus_schema(npu_kernels):
    """The CPU kernels behind the operators cannot hide a call that a device would refuse."""
    query, key, weights = (x.detach() for x in inputs_of())
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'topk'"):
        torch.ops.npu.npu_lightning_indexer.default(query, key[:, :, None], weights, topk=12)
    wrong = SimpleNamespace(sum=torch.tensor([45, 90]))
    with pytest.raises(RuntimeError, match="actual_seq_qlen"):
        torch.ops.npu.npu_dense_lightning_indexer_softmax_lse.default(
            query.flatten(0, 1), key.flatten(0, 1)[:, None], weights.flatten(0, 1), actual_seq_qlen=wrong
        )
