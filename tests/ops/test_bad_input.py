"""Bad input is refused with a message that names the operator and the limit."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.backend import BackendUnavailable, choose
from mindspeed_dsa.ops.indexer_kl_loss import (
    dense_indexer_kl_loss,
    divergence_and_score_gradient,
    indexer_kl_loss,
)
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from mindspeed_dsa.ops.quantised_indexer import quantised_indexer
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.ops.random_inputs import BACKENDS, indexer_inputs, random_indices

ROWS = 6


def main_inputs(dtype=torch.float32, device="cpu"):
    return torch.ones(1, ROWS, 2, 8, dtype=dtype, device=device), torch.ones(
        1, ROWS, 8, dtype=dtype, device=device
    )


def index_inputs(dtype=torch.float32, device="cpu"):
    return [x.to(dtype=dtype, device=device) for x in indexer_inputs(1, ROWS)]


def attention(indices, backend="auto", **inputs):
    return sparse_flash_attention(*main_inputs(**inputs), indices, 0.3, value_dim=4, backend=backend)


def loss(indices, backend="auto", **inputs):
    return indexer_kl_loss(*index_inputs(**inputs), *main_inputs(**inputs), indices, 0.3, backend=backend)


def scores(indices, backend="auto", **inputs):
    return selected_scores(*index_inputs(**inputs), indices, backend=backend)


def selection(indices, backend="auto", **inputs):
    return lightning_indexer(*index_inputs(**inputs), indices.shape[-1], backend=backend)


def dense(indices, backend="auto", **inputs):
    return dense_indexer_kl_loss(*index_inputs(**inputs), *main_inputs(**inputs), 0.3, backend=backend)


TAKE_INDICES = {
    "sparse_flash_attention": attention,
    "indexer_kl_loss": loss,
    "lightning_indexer": scores,
}
BAD_ROWS = {
    "beyond-the-last-key": (
        [0, ROWS, -1],
        "topk_indices must lie in [-1, 6), got values from -1 to 6",
    ),
    "below-minus-one": ([0, 1, -2], "topk_indices must lie in [-1, 6), got values from -2 to 5"),
    "hole-before-the-tail": (
        [1, -1, 2],
        (
            "a valid entry follows -1 in 1 rows of topk_indices, first row [0, 4]; "
            "move the -1 entries to the tail"
        ),
    ),
    "twice": (
        [1, 5, 1],
        (
            "an index occurs twice in 1 rows of topk_indices, first row [0, 4]; "
            "a key that is listed twice would be counted twice"
        ),
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", TAKE_INDICES)
@pytest.mark.parametrize("problem", BAD_ROWS)
def test_debug_mode_checks_the_contents_of_indices(operator, problem, backend):
    row, message = BAD_ROWS[problem]
    indices = torch.tensor([3, 5, -1]).repeat(1, ROWS, 1).int()
    TAKE_INDICES[operator](indices, backend)
    indices[0, 4] = torch.tensor(row)
    with pytest.raises(ValueError, match="^" + re.escape(f"{operator}: {message}") + "$"):
        TAKE_INDICES[operator](indices, backend)


def test_contents_are_looked_at_in_debug_mode_only(monkeypatch):
    indices = torch.tensor([1, 5, 1]).repeat(1, ROWS, 1).int()
    checks.set_debug_checks(False)
    for call in TAKE_INDICES.values():
        call(indices)
    assert checks.set_debug_checks(True) is False
    with pytest.raises(ValueError, match="occurs twice in 6 rows"):
        attention(indices)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["query", "key", "weights"])
@pytest.mark.parametrize("select", [lightning_indexer, quantised_indexer])
def test_operands_of_the_indexer_that_are_no_numbers_are_named_in_debug_mode(select, place, value):
    operands = dict(zip(("query", "key", "weights"), index_inputs(), strict=True))
    operands[place][0, 4] = value
    with pytest.raises(
        ValueError, match=rf"{place} is not finite at \d+ of \d+ places, first \[0, 4.*\]; look"
    ):
        select(**operands, topk=3)
    checks.set_debug_checks(False)
    selected = select(**operands, topk=3)
    # Only the debug check finds a NaN key, because no row may select it.
    if place == "key" and value != value:
        assert not (getattr(selected, "topk_indices", selected)[0, ROWS - 1] == 4).any()


CALLS = {**TAKE_INDICES, "lightning_indexer-select": selection, "indexer_kl_loss-dense": dense}


@pytest.mark.parametrize("name", CALLS)
def test_dtypes_that_no_backend_takes(name):
    operator = name.partition("-")[0]
    indices = random_indices(1, ROWS, ROWS, 3)
    with pytest.raises(ValueError, match=rf"^{operator}: .* must be floating point, got torch.int32"):
        CALLS[name](indices, dtype=torch.int32)


@pytest.mark.parametrize("name", CALLS)
def test_the_cpu_backend_names_the_device_it_cannot_take(name):
    operator = name.partition("-")[0]
    checks.set_debug_checks(False)
    indices = random_indices(1, ROWS, ROWS, 3).to("meta")
    expected = (
        rf"^{operator}: backend 'cpu' cannot run float32 on meta, .*heads \d+.*: it runs on CPU tensors only"
        r"\. Ask for 'auto' to take the best backend that can, or for the slow and exact 'reference' "
        r"\(in training with --dsa-backend\)$"
    )
    with pytest.raises(BackendUnavailable, match=expected):
        CALLS[name](indices, "cpu", device="meta")


@pytest.mark.parametrize("backend", ["triton", "npu"])
@pytest.mark.parametrize("name", CALLS)
def test_backends_of_other_devices_refuse_cpu_tensors(name, backend, monkeypatch):
    """Backends of other devices name the missing package or the wrong device; they never fall back
    silently.
    """
    if importlib.util.find_spec("triton"):
        # Switch off interpreter mode, in which this process may have defined its kernels.
        monkeypatch.setattr("mindspeed_dsa.ops.triton.common.interpreted", lambda: False)
    choose.cache_clear()
    operator = name.partition("-")[0]
    reason = "(the package '.*' is not installed|.* (CUDA|GPU|NPU) .*)"
    message = rf"^{operator}: backend '{backend}' cannot run float32 on cpu, .*: {reason}\. Ask for 'auto'"
    with pytest.raises(BackendUnavailable, match=message):
        CALLS[name](random_indices(1, ROWS, ROWS, 3), backend)
    choose.cache_clear()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", TAKE_INDICES)
def test_indices_that_are_none(operator, backend):
    """These checks are free, so they also run without debug mode."""
    checks.set_debug_checks(False)
    indices = random_indices(1, ROWS, ROWS, 3)
    bad = {
        r"topk_indices must be int32 or int64 on cpu, got torch.float32 on cpu": indices.float(),
        r"topk_indices must be int32 or int64 on cpu, got torch.bool on cpu": indices >= 0,
        r"topk_indices must be int32 or int64 on cpu, got torch.int32 on meta": indices.to("meta"),
        r"topk_indices must be \[1, 6, topk\], got \[1, 5, 3\]": indices[:, 1:],
        r"topk_indices must have at least one entry per row": indices[..., :0],
    }
    for message, tensor in bad.items():
        with pytest.raises(ValueError, match=f"^{operator}: {message}"):
            TAKE_INDICES[operator](tensor, backend)
        if operator == "indexer_kl_loss" and tensor.shape[1] == ROWS:
            scores = torch.zeros(tensor.shape)
            with pytest.raises(ValueError, match=f"^{operator}: {message}"):
                divergence_and_score_gradient(scores, scores, tensor, backend=backend)


@pytest.mark.parametrize("form", [loss, dense])
@pytest.mark.parametrize("backend", BACKENDS)
def test_index_weights_of_another_kind(form, backend, monkeypatch):
    index = index_inputs()
    indices = random_indices(1, ROWS, ROWS, 3)
    for weights, got in ((index[2].long(), "torch.int64 on cpu"), (index[2].to("meta"), "float32 on meta")):
        monkeypatch.setitem(globals(), "index_inputs", lambda weights=weights: [*index[:2], weights])
        with pytest.raises(
            ValueError, match=f"^indexer_kl_loss: index_weights must be .* on cpu, got .*{got}"
        ):
            form(indices, backend)


def test_sizes_that_do_not_fit_together():
    query, key = main_inputs()
    index = index_inputs()
    indices = random_indices(1, ROWS, ROWS, 3)
    with pytest.raises(ValueError, match=r"^sparse_flash_attention: key_value must be \[1, key_length, 8\]"):
        sparse_flash_attention(query, key[..., :7], indices, 0.3, value_dim=4)
    with pytest.raises(ValueError, match=r"^sparse_flash_attention: query must have at least one head"):
        sparse_flash_attention(query[:, :, :0], key, indices, 0.3, value_dim=4)
    with pytest.raises(ValueError, match=r"^indexer_kl_loss: key must be \[1, key_length"):
        indexer_kl_loss(*index, query, key[..., :7], indices, 0.3)
    with pytest.raises(ValueError, match=r"^indexer_kl_loss: index_weights must be \[1, 6, 4\]"):
        indexer_kl_loss(*index[:2], index[2][..., :3], query, key, indices, 0.3)
    with pytest.raises(ValueError, match=r"^indexer_kl_loss: row_mask must be bool \[1, 6\]"):
        indexer_kl_loss(*index, query, key, indices, 0.3, row_mask=torch.ones(1, ROWS))
    with pytest.raises(ValueError, match=r"^indexer_kl_loss: reduction must be 'mean' or 'sum', got 'none'"):
        indexer_kl_loss(*index, query, key, indices, 0.3, reduction="none")


@pytest.mark.parametrize("name", ["lse", "topk_scores", "attention_sum"])
@pytest.mark.parametrize("wrong", ["one batch", "one entry", "integers"])
def test_what_the_loss_is_given_must_fit(name, wrong):
    query, key = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 8)
    index = torch.randn(2, 5, 2, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 2)
    position = torch.arange(5, dtype=torch.int32)
    topk_indices = position.where(position <= position[:, None], -1).expand(2, 5, 5)
    whole = torch.randn(2, 5, 3 if name == "lse" else 5)
    given = {"one batch": whole[:1], "one entry": whole[..., :1], "integers": whole.int()}[wrong]
    with pytest.raises(ValueError, match=f"indexer_kl_loss: {name} must"):
        indexer_kl_loss(*index, query, key, topk_indices, 0.3, **{name: given})
