"""Indexers that learn for all layers that use their selection: formula, recomputation, memory and copies.

Layers 1 and 2 of the model reuse layer 0's selection; layer 3 has an indexer that no other layer uses.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch.autograd import grad

from mindspeed_dsa.integrations.transformers import apply_dsa, layers
from tests.hosts.transformers.models import INPUTS, KINDS, TOPK, build, close, tokens

pytestmark = pytest.mark.full

KIND = "glm_moe_dsa serving"
KINDS_SERVING = [name for name in KINDS if name.endswith(" serving")]
SERVED = [0, 1, 2]


def step(model, ids=None, **options):
    """Run a backward pass; return the model's loss and all gradients."""
    ids = tokens() if ids is None else ids
    model.zero_grad()
    output = model(ids, labels=ids, use_cache=False, **options)
    output.loss.backward()
    return output.loss.detach(), {
        name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None
    }


def unlike(ours, theirs):
    """Return names of gradients whose bits differ."""
    assert ours.keys() == theirs.keys()
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def freeze_all_but_indexers(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name)


# -- formula -----------------------------------------------------------------------------------


class Captured:
    """Inputs of indexers and of attention, per layer, from one forward pass on the operators."""

    def __init__(self, model, monkeypatch):
        from transformers import AttentionInterface

        self.indexer, self.attention = {}, {}
        monkeypatch.setattr(layers, "is_faster_by_head", lambda *_: True)
        for layer in model.model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.register_forward_pre_hook(self._keep)
        AttentionInterface.register(layers.NAME, self._attend)

    def _keep(self, indexer, args):
        self.indexer[indexer.layer_idx] = [args[0].detach(), args[1].detach(), args[2]]

    def _attend(self, module, query, key, value, mask, scaling, indices=None, **kwargs):
        self.attention[module.layer_idx] = query.detach(), key.detach(), scaling
        return layers.attend(module, query, key, value, mask, scaling, indices=indices, **kwargs)

    def scores(self, indexer, rotate):
        """Return index scores ``[batch, rows, keys]`` with the graph of the indexer's parameters."""
        hidden, latent, (cosines, sines) = self.indexer[indexer.layer_idx]
        query = indexer.wq_b(latent).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        key = indexer.k_norm(indexer.wk(hidden))[:, :, None]
        rope = indexer.qk_rope_head_dim
        turned = rotate(query[..., :rope], key[..., :rope], cosines, sines, unsqueeze_dim=2)
        query = torch.cat([turned[0], query[..., rope:]], -1)
        key = torch.cat([turned[1], key[..., rope:]], -1)[:, :, 0]
        # transformers forms the weights in fp32.
        weights = (
            indexer.weights_proj(hidden).float() * indexer.n_heads**-0.5 * indexer.softmax_scale
        ).double()
        return torch.einsum("bth,bths->bts", weights, torch.einsum("bthd,bsd->bths", query, key).relu())

    def target(self, layer, mask):
        """Return the mean over heads of a layer's probabilities at the keys of ``mask``."""
        query, key, scaling = self.attention[layer]
        scores = torch.einsum("bhtd,bhsd->bhts", query, key) * scaling
        return scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1).mean(1)


def divergence(target, scores, mask):
    """Return the mean over tokens of KL(target || softmax of the scores at the keys of ``mask``)."""
    log_r = scores.masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0)
    return (torch.xlogy(target, target) - target * log_r).sum(-1).mean()


@pytest.mark.parametrize("option", ["served", "served-sum"])
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_losses_are_the_formula_and_their_mean_has_the_gradient_of_the_mean_target(
    stage, option, monkeypatch
):
    # torch's grouped matmul takes no fp64.
    model = build(KIND, experts_implementation="eager").double()
    in_use = apply_dsa(model, stage=stage, loss_coeff=1.0, indexer_loss_layers=option)
    captured = Captured(model, monkeypatch)
    model(tokens(), use_cache=False)
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

    indexer = model.model.layers[0].self_attn.indexer
    scores = captured.scores(indexer, apply_rotary_pos_emb_interleave)
    mask = torch.ones(scores.shape, dtype=torch.bool).tril()
    if stage == "sparse":
        best = scores.masked_fill(~mask, -torch.inf).topk(TOPK, -1).indices
        mask = mask & torch.zeros_like(mask).scatter(-1, best, True)
    targets = [captured.target(layer, mask) for layer in SERVED]
    expected = [divergence(target, scores, mask) for target in targets]
    assert list(in_use.losses) == [*SERVED, 3]
    for layer, loss in zip(SERVED, expected, strict=True):
        assert close(in_use.losses[layer].detach(), loss.detach(), 1e-12)
    whole = sum(expected) if option == "served-sum" else sum(expected) / len(SERVED)
    assert close(in_use.loss.detach(), (whole + in_use.losses[3]).detach(), 1e-12)
    parameters = list(indexer.parameters())
    ours = grad(in_use.loss, parameters, retain_graph=True)
    # Divergences from several targets differ from the divergence from their mean by a constant.
    to_mean = divergence(sum(targets) / len(SERVED), scores, mask)
    factor = len(SERVED) if option == "served-sum" else 1
    # In the warm-up the gradient of the fp32 weights is rounded once per layer instead of once.
    bound = 1e-9 if stage == "sparse" else 1e-6
    for theirs in (grad(factor * to_mean, parameters, retain_graph=True), grad(whole, parameters)):
        assert [x.shape for x, y in zip(ours, theirs, strict=True) if not close(x, y, bound)] == []
    assert to_mean < sum(expected) / len(SERVED)


# -- own and served ----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_own_is_unchanged_and_served_changes_only_indexers_that_serve(stage):
    model = build(KIND)
    options = {"stage": stage, "loss_coeff": 0.5}
    in_use = apply_dsa(model, **options)
    loss, default = step(model)
    default_losses = dict(in_use.losses)
    in_use.undo()
    results = {}
    for name in ("own", "served", "served-sum"):
        in_use = apply_dsa(model, **options, indexer_loss_layers=name)
        results[name] = step(model)[1]
        assert all(torch.equal(in_use.losses[i], default_losses[i]) for i in default_losses)
        assert list(in_use.losses) == ([0, 3] if name == "own" else [0, 1, 2, 3])
        if name == "own":
            assert torch.equal(step(model)[0], loss)
        in_use.undo()
    assert unlike(results["own"], default) == []
    serving = sorted(name for name in default if "layers.0.self_attn.indexer." in name)
    assert sorted(unlike(results["served"], default)) == serving
    for name in serving:
        assert close(3 * results["served"][name], results["served-sum"][name])


@pytest.mark.parametrize("kind", ["left padding", "packed", "few keys"])
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("name", KINDS_SERVING)
def test_padding_packs_and_short_texts_have_the_losses_of_an_indexer_in_each_layer(name, stage, kind):
    """A layer that has a copy of the indexer's operands and its own attention has the same loss."""
    model = build(name)
    in_use = apply_dsa(model, stage=stage, loss_coeff=1.0, indexer_loss_layers="served")
    kept = {}
    original = layers.deepseek_sparse_attention

    def keep(query, key, value, *operands, **options):
        # Layers 1 and 2 get layer 0's operands.
        operands = kept.setdefault("operands", operands) if len(losses) < 3 else operands
        result = original(query, key, value, *operands, **options)
        losses.append(result.loss.detach())
        return result

    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "deepseek_sparse_attention", keep)
        model(**INPUTS[kind], use_cache=False)
    model(**INPUTS[kind], use_cache=False)
    assert len(losses) == 4
    for layer in SERVED:
        assert close(in_use.losses[layer].detach(), losses[layer])


def test_evaluation_and_frozen_indexers_have_no_loss():
    model = build(KIND)
    in_use = apply_dsa(model, loss_coeff=0.5, indexer_loss_layers="served")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers.0.self_attn.indexer." not in name)
    step(model)
    assert list(in_use.losses) == [3]
    model.requires_grad_(True).eval()
    model(tokens())
    assert in_use.loss is None
    with torch.no_grad():
        model.train()(tokens())
    assert in_use.loss is None
    assert model.generate(tokens(1, 8), max_new_tokens=3, do_sample=False).shape == (1, 11)


# -- recomputation, several forwards, copies ---------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "indexers"])
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("name", KINDS_SERVING)
def test_recomputed_layers_have_the_same_bits(name, stage, frozen):
    model = build(name)
    in_use = apply_dsa(model, stage=stage, loss_coeff=0.5, indexer_loss_layers="served")
    if frozen:
        freeze_all_but_indexers(model)
    loss, expected = step(model)
    losses = {layer: float(x.detach()) for layer, x in in_use.losses.items()}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, recomputed = step(model)
    assert torch.equal(again, loss)
    assert {layer: float(x.detach()) for layer, x in in_use.losses.items()} == losses
    assert unlike(recomputed, expected) == []


def test_layers_recompute_with_the_selection_of_their_own_forward_pass():
    """Two forward passes before their backward passes, as with pairs of a preference loss."""
    model = build(KIND)
    apply_dsa(model, loss_coeff=0.5, indexer_loss_layers="served")
    both = [tokens(), tokens().flip(1)]
    alone = [step(model, ids)[1] for ids in both]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    outputs = [model(ids, labels=ids, use_cache=False).loss for ids in both]
    for number in (1, 0):
        model.zero_grad()
        outputs[number].backward()
        gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        assert unlike(gradients, alone[number]) == []


def test_copies_and_other_models_are_separate():
    model, other = build(KIND), build(KIND, index_topk=4)
    in_use = apply_dsa(model, loss_coeff=0.5, indexer_loss_layers="served")
    apply_dsa(other, loss_coeff=0.5, indexer_loss_layers="served-sum")
    _, expected = step(model)
    losses = dict(in_use.losses)
    assert unlike(step(copy.deepcopy(model))[1], expected) == []
    step(other)
    assert in_use.losses == losses
    assert unlike(step(model)[1], expected) == []


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_scores_are_freed_with_the_last_layer_that_needs_them(stage, recomputed, monkeypatch):
    model = build(KIND)
    apply_dsa(model, stage=stage, loss_coeff=0.5, indexer_loss_layers="served")
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    alive = []

    class Watched(layers.Shared):
        def __init__(self, *args):
            super().__init__(*args)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(layers, "Shared", Watched)
    loss = model(tokens(), labels=tokens(), use_cache=False).loss
    gc.collect()
    assert len(alive) == 1
    # Without recomputation only graphs remain after the forward pass.
    assert (alive[0]() is not None) == recomputed
    at_the_source = []
    # The gradient of layer 0's last norm comes after the backward passes of layers 1 and 2.
    first = model.model.layers[0].post_attention_layernorm.weight
    first.register_hook(lambda _: at_the_source.append([x() is not None for x in alive[:1]]))
    loss.backward()
    gc.collect()
    assert at_the_source == [[False]]
    assert [x() for x in alive if x() is not None] == []
