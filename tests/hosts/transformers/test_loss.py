"""The indexer's loss in transformers' models: values and gradients from transformers' tensors, and its uses.

Index scores are computed by transformers' indexers, with a graph because their ``no_grad`` is removed.
Probabilities come from eager attention; the divergence is a formula in fp64.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode

from mindspeed_dsa.integrations.transformers import apply_dsa
from tests.hosts.transformers.models import (
    FAMILIES,
    INPUTS,
    TOPK,
    build,
    close,
    layers_of,
    tokens,
    without_fp32,
)
from tests.ops import oracle

pytestmark = pytest.mark.full


class Scores(TorchFunctionMode):
    """Mode that collects index scores from every indexer call, at ``Tensor.topk``."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "topk" and args[0].dim() == 3:
            self.found.append(args[0])
        return function(*args, **(kwargs or {}))


def detached(args):
    return [detached(x) if isinstance(x, tuple) else x.detach() if x is not None else x for x in args]


def expected_losses(model, stage, inputs, monkeypatch):
    """Return losses of the layers with an indexer, each with its own operands, from transformers' tensors."""
    if stage == "warmup":
        model = copy.deepcopy(model)
        for layer in layers_of(model):
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.index_topk = 10**6
    indexers = [x.self_attn.indexer for x in layers_of(model) if x.self_attn.indexer is not None]
    kind = type(indexers[0])
    kept = kind.forward
    with_graph = inspect.unwrap(kind.forward)
    monkeypatch.setattr(
        kind,
        "forward",
        lambda self, *args, **kwargs: with_graph(self, *detached(args), **kwargs),
    )
    with Scores() as scores:
        output = model(**inputs, use_cache=False, output_attentions=True)
    monkeypatch.setattr(kind, "forward", kept)
    having = [i for i, x in enumerate(layers_of(model)) if x.self_attn.indexer is not None]
    losses, counted = {}, inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    routed = [index_scores for index_scores in scores.found if index_scores.shape[1] == index_scores.shape[2]]
    for layer, index_scores in zip(having, routed, strict=True):
        probabilities = (
            output.attentions[layer].detach().double().transpose(1, 2)
        )  # [batch, rows, heads, keys]
        mask = index_scores > torch.finfo(index_scores.dtype).min / 2
        if stage == "sparse":
            selection = index_scores.topk(min(TOPK, index_scores.shape[-1]), dim=-1).indices
            mask = mask & torch.zeros_like(mask).scatter(-1, selection, True)
        rows = oracle.divergence(
            index_scores.double().masked_fill(~mask, 0.0), probabilities * mask[:, :, None], mask
        )
        losses[layer] = rows[counted].mean()
    return losses, {layer: layers_of(model)[layer].self_attn.indexer for layer in having}


@pytest.mark.parametrize("kind", ["causal", "left padding", "right padding", "packed"])
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_their_gradients_are_the_formula_s(name, stage, kind, monkeypatch):
    model = build(name)
    losses, indexers = expected_losses(model, stage, INPUTS[kind], monkeypatch)
    in_use = apply_dsa(model, stage=stage, loss_coeff=1.0)
    model(**INPUTS[kind], use_cache=False)
    assert in_use.losses.keys() == losses.keys()
    for layer, expected in losses.items():
        assert close(in_use.losses[layer].double(), expected)
        theirs = torch.autograd.grad(expected, list(indexers[layer].parameters()))
        own = list(layers_of(model)[layer].self_attn.indexer.parameters())
        ours = torch.autograd.grad(in_use.losses[layer], own)
        assert [x.shape for x, y in zip(ours, theirs, strict=True) if not close(x, y, 1e-4)] == []


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_their_gradients_are_the_formula_s_in_fp64(name, stage, monkeypatch):
    without_fp32(monkeypatch)
    model = build(name, experts_implementation="eager").double()
    losses, indexers = expected_losses(model, stage, INPUTS["left padding"], monkeypatch)
    in_use = apply_dsa(model, stage=stage, loss_coeff=1.0)
    model(**INPUTS["left padding"], use_cache=False)
    assert in_use.losses.keys() == losses.keys()
    for layer, expected in losses.items():
        assert close(in_use.losses[layer], expected, 1e-9)
        theirs = torch.autograd.grad(expected, list(indexers[layer].parameters()))
        own = list(layers_of(model)[layer].self_attn.indexer.parameters())
        ours = torch.autograd.grad(in_use.losses[layer], own)
        assert [x.shape for x, y in zip(ours, theirs, strict=True) if not close(x, y, 1e-9)] == []


def gradients(model, **options):
    model.zero_grad()
    output = model(tokens(), labels=tokens(), use_cache=False, **options)
    output.loss.backward()
    return output, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_s_loss_has_it_and_the_model_s_gradients_do_not(name):
    model = build(name)
    plain, without = gradients(model)
    in_use = apply_dsa(model, loss_coeff=0.25)
    output, gradients_with_loss = gradients(model)
    assert close(output.loss, plain.loss + 0.25 * in_use.loss.detach())
    assert {name for name in gradients_with_loss if name not in without} == {
        name for name, _ in model.named_parameters() if ".indexer." in name
    }
    several = [name for name in without if without[name].numel() >= 8]
    assert [name for name in several if not close(gradients_with_loss[name], without[name])] == []
    if name == "deepseek_v32":
        # input_ids, attention_mask, position_ids, cache, inputs_embeds, labels
        assert torch.equal(model(tokens(), None, None, None, None, tokens(), False).loss, output.loss)
    as_tuple = model(tokens(), labels=tokens(), use_cache=False, return_dict=False)
    assert torch.equal(as_tuple[0], output.loss)


def test_microbatches_weigh_as_their_tokens_do():
    model = build("deepseek_v32")
    in_use = apply_dsa(model, loss_coeff=0.5)
    labels = tokens().clone()
    labels[:, :20] = -100
    plain = model(tokens(), labels=labels, num_items_in_batch=100).loss - 0.5 * in_use.loss * (2 * 20 / 100)
    in_use.undo()
    assert close(plain, model(tokens(), labels=labels, num_items_in_batch=100).loss)


def test_heads_that_shift_no_labels_count_all_of_them():
    config = build("axk2").config
    config.num_labels, config._experts_implementation = 2, "eager"
    model = transformers.AXK2ForSequenceClassification(config).double()
    in_use = apply_dsa(model, loss_coeff=0.5)
    inputs = {"input_ids": tokens()[:1], "labels": torch.tensor([1]), "num_items_in_batch": 1}
    plain = model(**inputs).loss - 0.5 * in_use.loss
    in_use.undo()
    assert close(plain, model(**inputs).loss)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_that_are_recomputed_give_the_same_losses_and_gradients(name):
    model = build(name)
    in_use = apply_dsa(model, loss_coeff=0.5)
    output, expected = gradients(model)
    losses = dict(in_use.losses)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, recomputed = gradients(model)
    assert torch.equal(again.loss, output.loss)
    assert {layer: float(x) for layer, x in in_use.losses.items()} == {
        layer: float(x) for layer, x in losses.items()
    }
    assert [name for name in expected if not torch.equal(recomputed[name], expected[name])] == []
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="'use_reentrant': False"):
        gradients(model)


def test_there_is_no_loss_in_evaluation_without_gradients_or_with_frozen_indexers():
    model = build("glm_moe_dsa")
    in_use = apply_dsa(model, loss_coeff=0.5)
    plain = build("glm_moe_dsa")(tokens(), labels=tokens()).loss
    with torch.no_grad():
        assert close(model(tokens(), labels=tokens()).loss, plain)
    assert close(model.eval()(tokens(), labels=tokens()).loss, plain)
    assert in_use.loss is None
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in name)
    with pytest.raises(ValueError, match="no parameter of an indexer requires a gradient"):
        model(tokens(), labels=tokens())


def test_warm_up_trains_indexers_alone_and_then_the_sparse_stage_both():
    """As on the page: attention is dense and the model frozen, until indexers know the important keys."""
    model = build("deepseek_v32")
    dense = build("deepseek_v32", index_topk=1000)(tokens()).logits.detach()
    in_use = apply_dsa(model, stage="warmup", loss_coeff=1.0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name)
    before = {name: x.clone() for name, x in model.named_parameters()}
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2)
    losses = []
    for _ in range(40):
        output = model(tokens(), labels=tokens(), use_cache=False)
        assert close(output.logits, dense)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(in_use.loss))
    assert losses[-1] < 0.5 * losses[0]
    moved = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert moved == {name for name in before if ".indexer." in name}
    in_use.stage = "sparse"
    model.requires_grad_(True)
    output, of = gradients(model)
    assert not close(output.logits, dense)
    assert len(of) > len(moved)
