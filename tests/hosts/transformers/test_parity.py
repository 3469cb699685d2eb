"""Logits, gradients and generated tokens of transformers' models equal transformers' own attention.

The comparison is with the installed transformers in fp32, ``eager`` and ``sdpa``.
"""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mindspeed_dsa.integrations.transformers import NAME, apply_dsa, layers, masks
from tests.hosts.transformers.models import (
    FAMILIES,
    INPUTS,
    KINDS,
    TOPK,
    build,
    close,
    layers_of,
    tokens,
    without_fp32,
)
from tests.npu.counting import counted

pytestmark = pytest.mark.full


def step(model, inputs):
    """Return logits, and gradients of the loss of predicted tokens, without padding."""
    model.zero_grad()
    counts = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    predicted = counts * torch.cat([counts[:, :1], counts[:, :-1]], dim=1)
    labels = inputs["input_ids"].masked_fill(predicted == 0, -100)
    output = model(**inputs, labels=labels, use_cache=False)
    output.loss.backward()
    logits = output.logits[counts.bool()]
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return logits.detach(), gradients


def compare(name, kind, **options):
    model = build(name, **options)
    logits, gradients = step(model, INPUTS[kind])
    gradients = {key: x.clone() for key, x in gradients.items()}
    calls = []
    in_use = apply_dsa(model)
    for layer in layers_of(model):
        layer.self_attn.register_forward_hook(
            lambda module, *_: calls.append(module.config._attn_implementation)
        )
    ours, of_ours = step(model, INPUTS[kind])
    assert calls == [NAME] * len(layers_of(model))
    assert close(ours, logits)
    assert of_ours.keys() == gradients.keys()
    # Scales and offsets of whole streams, and scales of angles, are sums in which fp32 cancels; fp64 compares
    # them below.
    several = [key for key in gradients if gradients[key].numel() >= 8 and not key.endswith("_hc.base")]
    assert [key for key in several if not close(of_ours[key], gradients[key])] == []
    in_use.undo()
    again, _ = step(model, INPUTS[kind])
    assert torch.equal(again, logits)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", KINDS)
def test_logits_and_gradients_are_eager_s(name, kind):
    compare(name, kind)


# transformers has no sdpa with sinks.
@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("hy_v4")])
def test_logits_and_gradients_are_sdpa_s(name):
    compare(name, "causal", attn_implementation="sdpa")


@pytest.mark.skipif("hy_v4_vl" not in KINDS, reason="not in this release of transformers")
def test_positions_of_images_are_rotated_by_time_height_and_width():
    """After 5 tokens of text come 4 rows of 6 tokens each; the first axis separates two documents."""
    image = torch.meshgrid(torch.arange(1), torch.arange(4), torch.arange(6), indexing="ij")
    grid = torch.stack(image).flatten(1).long() + 5
    text = torch.arange(5).expand(3, -1)
    positions = torch.cat([text, grid, torch.arange(11).expand(3, -1)], dim=1)
    of_text = torch.cat([torch.arange(29), torch.arange(11)])
    inputs = {"input_ids": tokens(1), "position_ids": torch.cat([of_text[None], positions])[:, None]}
    model = build("hy_v4_vl")
    logits, gradients = step(model, inputs)
    gradients = {key: x.clone() for key, x in gradients.items()}
    without_image = {**inputs, "position_ids": of_text.expand(4, 1, -1)}
    assert not close(step(model, without_image)[0], logits, 1e-2)
    apply_dsa(model)
    ours, of_ours = step(model, inputs)
    assert close(ours, logits)
    weights = [key for key in gradients if key.endswith("_proj.weight")]
    assert [key for key in weights if not close(of_ours[key], gradients[key])] == []


@pytest.mark.parametrize("kind", ["causal", "left padding"])
@pytest.mark.parametrize("name", [name for name in KINDS if "yarn" not in name])
def test_logits_and_gradients_in_fp64_are_eager_s(name, kind, monkeypatch):
    without_fp32(monkeypatch)
    model = build(name, experts_implementation="eager").double()
    logits, gradients = step(model, INPUTS[kind])
    gradients = {key: x.clone() for key, x in gradients.items()}
    apply_dsa(model)
    ours, of_ours = step(model, INPUTS[kind])
    assert close(ours, logits, 1e-9)
    assert of_ours.keys() == gradients.keys()
    assert [key for key in gradients if not close(of_ours[key], gradients[key], 1e-9)] == []


@pytest.mark.parametrize("name", [name for name in KINDS if " " not in name])
def test_keys_stay_latent_where_that_is_faster(name, monkeypatch):
    """Absorbed attention sums in another order, with equal logits and gradients, up-projection included."""
    seen = []
    monkeypatch.setattr(layers, "is_faster_by_head", lambda *args: seen.append(args) or False)
    compare(name, "causal")
    assert seen


def test_masks_of_the_user_are_read():
    model = build("deepseek_v32")
    ids = tokens(1, 24)
    window = (torch.arange(24)[:, None] - torch.arange(24)).clamp(-1, 15)
    visible = ((window >= 0) & (window < 15))[None, None]
    masks_by_dtype = {
        "bool": visible,
        "float": torch.zeros(visible.shape).masked_fill(~visible, torch.finfo().min),
    }
    with torch.no_grad():
        expected = model(ids, attention_mask=masks_by_dtype["float"]).logits
        apply_dsa(model)
        for mask in masks_by_dtype.values():
            assert close(model(ids, attention_mask=mask).logits, expected)
        with pytest.raises(ValueError, match="not one behind the other"):
            model(ids, attention_mask=visible & (torch.arange(24) != 3))


def test_a_mask_is_waited_for_once():
    """For any mask: a row of padding has two queries, and so does a float mask of the user."""
    chunked = {"mask_function": lambda batch, head, row, key: (key <= row) & (row - key < 15)}
    tokens = torch.ones(2, 24, dtype=torch.bool)
    padded = tokens.clone()
    padded[0, :5] = False
    user = torch.zeros(1, 1, 24, 24).masked_fill(~torch.ones(24, 24, dtype=torch.bool).tril(), -1e9)
    for ask in (
        lambda: masks.ranges_mask(2, 24, 24, attention_mask=tokens),
        lambda: masks.ranges_mask(2, 24, 24, attention_mask=padded),
        lambda: masks.ranges_mask(2, 24, 24, **chunked),
        lambda: masks.rows_of(user),
    ):
        with mock.patch.object(masks, "_CHUNK", 10 * 24 * 2), counted() as counts:
            ask()
        assert len(counts.host_reads) == 1, counts.told("host_reads")


@pytest.mark.parametrize("hidden", [-9984.0, -1e9, float("-inf")])
def test_a_mask_hides_by_any_large_number_and_serves_a_whole_batch(hidden):
    model = build("deepseek_v32")
    ids = tokens(2, 24)
    distance = torch.arange(24)[:, None] - torch.arange(24)
    mask = torch.zeros(1, 1, 24, 24).masked_fill((distance < 0) | (distance >= 15), hidden)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        apply_dsa(model)
        assert close(model(ids, attention_mask=mask).logits, expected)


WRONG_MASKS = {
    "bias": (lambda mask: mask - 0.5 * torch.arange(24), "adds to the scores of keys"),
    "by head": (lambda mask: mask.expand(-1, 4, -1, -1), "a mask for each head"),
    "int32": (lambda mask: (mask == 0).int(), "torch.int32; give bool"),
    "int64": (lambda mask: (mask == 0).long(), "torch.int64; give bool"),
}


@pytest.mark.parametrize("kind", WRONG_MASKS)
def test_a_mask_that_is_more_than_visible_keys_is_refused(kind):
    make, message = WRONG_MASKS[kind]
    model = build("deepseek_v32")
    apply_dsa(model)
    mask = torch.full((24, 24), torch.finfo().min).triu(1)[None, None]
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 24), attention_mask=make(mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_models_in_16_bits_run_near_those_in_32(name, dtype):
    """Selections and experts from 16-bit operands differ here and there, on both sides."""
    model, ids = build(name).eval(), tokens(8)
    exact = model(ids).logits.detach()
    model.to(dtype)
    theirs = model(ids).logits.float().detach()
    apply_dsa(model)
    ours = model(ids).logits.float().detach()
    # Quantiles of 320 tokens, because another expert changes one token's logits entirely.
    of_ours, of_theirs = ((each - exact).norm(dim=-1) for each in (ours, theirs))
    assert of_ours.median() < 1.3 * of_theirs.median()
    assert of_ours.quantile(0.9) < 1.5 * of_theirs.quantile(0.9)


class Indexed(TorchFunctionMode):
    """Mode that collects queries, keys, weights and selections of transformers' indexers."""

    def __init__(self):
        super().__init__()
        self.found, self.products = [], []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, result = getattr(function, "__name__", ""), function(*args, **(kwargs or {}))
        # Routers select of [tokens, groups, experts].
        if name == "topk" and args[0].shape[-2:] == (40, 40):
            # Scores of heads, then their weighted sum
            (query, key), (weights, _) = self.products[-2:]
            self.found.append((query, key[:, 0].mT, weights[..., 0, :], result.indices))
        if name == "matmul":
            self.products.append(args)
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_selections_in_16_bits_are_by_transformers_scores_of_16_bit_operands(name, dtype, monkeypatch):
    """Only dots3_note's operands are fp32 in a 16-bit model; they are rounded here, for NPUs' indexer."""
    model, calls, operands = build(name).eval().to(dtype), [], []
    indexers = [x.self_attn.indexer for x in layers_of(model) if x.self_attn.indexer is not None]
    for indexer in indexers:
        indexer.register_forward_pre_hook(lambda _, *args: calls.append(args), with_kwargs=True)
    with torch.no_grad(), Indexed() as theirs:
        model(tokens(), use_cache=False)
    apply_dsa(model)
    select = layers.lightning_indexer
    monkeypatch.setattr(
        layers,
        "lightning_indexer",
        lambda *args, **options: operands.append(args) or select(*args, **options),
    )
    causal = torch.empty(2, 40, 0, dtype=torch.int32)
    for indexer, (args, kwargs), found in zip(indexers, list(calls), theirs.found, strict=True):
        ours = indexer(*args, **kwargs | {"attention_mask": causal})
        assert [x.dtype for x in operands[-1][:2]] == [dtype, dtype]
        query, key, weights, selection = found
        rounded = [x.to(dtype).double() for x in (query, key)]
        assert name == "dots3_note" or torch.equal(rounded[0], query.double())
        of_heads = torch.einsum("bthd,bsd->bths", *rounded).relu() * weights.double()[..., None]
        visible = torch.ones(40, 40, dtype=torch.bool).tril()
        scores = of_heads.sum(2).masked_fill(~visible, -torch.inf)
        kept = torch.zeros(2, 40, 41, dtype=torch.bool).scatter(-1, ours.long() % 41, True)[..., :-1]
        assert (kept.sum(-1) == torch.arange(1, 41).clamp_max(TOPK)).all()
        assert not (kept & ~visible).any()
        lowest = scores.masked_fill(~kept, torch.inf).amin(-1)
        highest = scores.masked_fill(kept, -torch.inf).amax(-1)
        # Scores in fp32 round sums of 32 heads.
        assert (highest - lowest <= 1e-5 * of_heads.abs().sum(2).amax(-1)).all()
        same = kept.gather(-1, selection).sum() / kept.sum()
        assert same > (0.97 if name == "dots3_note" else 0.999)


def test_autocast_computes_in_its_dtype():
    model = build("glm_moe_dsa").eval()
    exact = model(tokens()).logits.detach()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(tokens()).logits.float().detach()
        apply_dsa(model)
        ours = model(tokens()).logits.float().detach()
    assert (ours - exact).norm() < 1.3 * (theirs - exact).norm()


# -- generation --------------------------------------------------------------------------------

WAYS = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "no cache": {"use_cache": False},
    "prefill in chunks": {"prefill_chunk_size": 16},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_generated_tokens_are_eager_s(name, way):
    """Includes left padding, and rows after a cache with more keys than a row selects."""
    model = build(name).eval()
    model.generation_config.pad_token_id = 0
    options = {
        "max_new_tokens": 20,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        **INPUTS["left padding"],
        **WAYS[way],
    }
    expected = model.generate(**copy.deepcopy(options))
    apply_dsa(model)
    found = model.generate(**copy.deepcopy(options))
    assert torch.equal(found.sequences, expected.sequences)
    assert all(close(ours, theirs) for ours, theirs in zip(found.logits, expected.logits, strict=True))


def test_a_row_behind_a_cache_expands_no_key(monkeypatch):
    """Keys that do not stay latent would all be expanded anew for every new token."""
    model = build("deepseek_v32").eval()
    apply_dsa(model)
    rows = []
    kind = type(model.model.layers[0].self_attn)
    expand = kind.expand_kv
    monkeypatch.setattr(
        kind, "expand_kv", lambda self, *args: rows.append(args[0].shape[2]) or expand(self, *args)
    )
    model.generate(tokens(1, 20), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert set(rows) <= {20}


def test_an_up_projection_that_somebody_replaced_is_called():
    """Absorbed queries multiply with its weight only, which would ignore the replaced forward."""
    model = build("deepseek_v32").eval()
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        projection.forward = lambda x, weight=projection.weight: torch.nn.functional.linear(x, 1.5 * weight)
    options = {
        "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    expected = model.generate(tokens(1, 20), **options).logits
    apply_dsa(model)
    found = model.generate(tokens(1, 20), **options).logits
    assert all(close(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_threads_that_share_a_model_have_calls_of_their_own(monkeypatch):
    """One thread is held between two parts of a layer, while another thread's call passes through."""
    model = build("deepseek_v32").eval()
    held, passed = threading.Event(), threading.Event()
    with torch.no_grad():
        before = model(tokens(1, 30), use_cache=True)
        inputs = {"input_ids": tokens(1, 1), "cache": before.cache}
        expected = model(**copy.deepcopy(inputs)).logits
        apply_dsa(model)
    indexer = model.model.layers[0].self_attn.indexer
    select = indexer.forward

    def selected(*args, **kwargs):
        selection = select(*args, **kwargs)
        if threading.current_thread() is not threading.main_thread():
            held.set()
            assert passed.wait(60)
        return selection

    monkeypatch.setattr(indexer, "forward", selected)

    def call():
        with torch.no_grad():
            return model(**inputs).logits

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(call)
        assert held.wait(60)
        with torch.no_grad():
            model(tokens(2, 5), use_cache=False)  # keys by head, while the other call's are latent
        passed.set()
        assert close(pending.result(), expected)
