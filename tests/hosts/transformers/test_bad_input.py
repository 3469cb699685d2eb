"""Unsupported models get one message with a remedy from :func:`apply_dsa`; undo leaves nothing."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mindspeed_dsa.integrations.transformers import NAME, apply_dsa, checks
from mindspeed_dsa.integrations.transformers.families import MISSING
from mindspeed_dsa.ops.backend import BackendUnavailable
from tests.hosts.transformers.models import build, close, in_release, tokens

pytestmark = pytest.mark.full


def other_model():
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=9,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def quantised():
    model = build("deepseek_v32")
    projection = model.model.layers[1].self_attn.kv_b_proj
    projection.weight = nn.Parameter(projection.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def asked_for_another():
    model = build("deepseek_v32")
    model.config._attn_implementation = "flex_attention"
    return model


def in_use():
    model = build("deepseek_v32")
    apply_dsa(model)
    return model


def two_models():
    return nn.ModuleDict({"teacher": build("deepseek_v32"), "student": build("glm_moe_dsa")})


def sharing_a_configuration():
    model = build("deepseek_v32")
    other = type(model)(model.config)
    apply_dsa(model)
    return other


WRONG = {
    "no transformers model": (lambda: nn.Linear(2, 2), {}, "give it one of deepseek_v32, glm_moe_dsa, axk2"),
    "unknown model": (
        other_model,
        {},
        "'llama', whose attention .* they serve deepseek_v32, glm_moe_dsa, axk2",
    ),
    "attention": (asked_for_another, {}, "attn_implementation='sdpa' or 'eager'"),
    "quantised": (quantised, {}, "layers.1.self_attn.kv_b_proj.weight .* quantised.*dequantize=True"),
    "dropout": (lambda: build("deepseek_v32", attention_dropout=0.1), {}, "attention_dropout=0.0"),
    "twice": (in_use, {}, r"call undo\(\)"),
    "several": (two_models, {}, "2 models of transformers .*call apply_dsa\\(\\) with each"),
    "another's configuration": (sharing_a_configuration, {}, r"copy\.deepcopy\(\)"),
    "infinite coefficient": (lambda: build("deepseek_v32"), {"loss_coeff": float("inf")}, "finite"),
    "stage": (lambda: build("deepseek_v32"), {"stage": "dense"}, "choose sparse or warmup"),
    "coefficient": (lambda: build("deepseek_v32"), {"loss_coeff": -1.0}, "0 or positive"),
    "loss layers": (lambda: build("glm_moe_dsa"), {"indexer_loss_layers": "all"}, "choose own, served or"),
    "serving no layer": (
        lambda: build("glm_moe_dsa"),
        {"indexer_loss_layers": "served-sum"},
        "in this model no layer does.*indexer_loss_layers='own'.*loss_coeff is 0; give a positive loss_coeff",
    ),
    "two coefficients": (
        lambda: build("deepseek_v32"),
        {"loss_coeff": 0.5, "loss_coefficient": 0.5},
        "another name of loss_coeff",
    ),
    "backend's name": (lambda: build("deepseek_v32"), {"backend": "cudnn"}, "choose one of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_message_and_changes_nothing(name):
    make, options, message = WRONG[name]
    model = make()
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        apply_dsa(model, **options)
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before


@pytest.mark.parametrize("kind", MISSING)
def test_models_are_refused_by_what_is_missing(kind):
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        pytest.skip("not in this release of transformers")
    model = other_model()
    model.config.model_type = kind
    with pytest.raises(
        ValueError, match=re.escape(f"'{kind}', for which these operators lack {MISSING[kind]}")
    ):
        apply_dsa(model)


def test_a_model_without_an_indexer_is_refused():
    """A model of this family may have dense layers instead of all layers with an indexer."""
    if not in_release("dots3_note"):
        pytest.skip("not in this release of transformers")
    model = build(
        "dots3_note", layer_types=["full_attention", "sliding_attention", "full_attention"], use_dsa=False
    )
    with pytest.raises(ValueError, match="no attention layer with an indexer"):
        apply_dsa(model)


def test_a_backend_that_cannot_run_here_is_named_with_the_reason():
    model = build("deepseek_v32")
    with pytest.raises(BackendUnavailable, match="'npu' cannot run"):
        apply_dsa(model, backend="npu")
    layer = model.model.layers[0].self_attn
    weight = SimpleNamespace(
        device=SimpleNamespace(type="mps"), is_floating_point=lambda: True, dtype=torch.float32
    )
    elsewhere = SimpleNamespace(attention_dropout=0.0, named_parameters=lambda: [("q_a_proj.weight", weight)])
    with pytest.raises(BackendUnavailable, match=r"'mps'.*cpu, cuda, npu.*backend='reference'"):
        checks.check(model, {"layer": elsewhere}, [[0]], "auto", False)
    apply_dsa(model)  # nothing was applied before
    assert layer.config._attn_implementation == NAME


def test_releases_without_these_models_are_named(monkeypatch):
    monkeypatch.setattr(checks, "version", lambda _: "4.57.6")
    with pytest.raises(ImportError, match=r"transformers 4\.57\.6 .*pip install 'transformers.*5\.20"):
        apply_dsa(build("deepseek_v32"))

    def missing(_):
        raise checks.PackageNotFoundError

    monkeypatch.setattr(checks, "version", missing)
    with pytest.raises(ImportError, match=r"pip install 'mindspeed_dsa\[transformers\]'"):
        apply_dsa(build("deepseek_v32"))


def unlike_indexers():
    """Return ways in which another release's indexer may differ from the tested ones."""
    kind = type(build("deepseek_v32").model.layers[0].self_attn.indexer)
    plain = kind.forward

    def with_scores(self, *args, **kwargs):
        indices = plain(self, *args, **kwargs)
        return indices.float(), indices

    def as_mask(self, *args, **kwargs):
        return plain(self, *args, **kwargs).bool()

    def with_more(self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, topk):
        raise AssertionError

    return kind, {
        "returns tuple": with_scores,
        "returns torch.bool": as_mask,
        r"cannot be called .*TypeError.*'topk'": with_more,
    }


@pytest.mark.parametrize("number", range(3))
def test_an_indexer_that_returns_other_than_indices_is_refused(monkeypatch, number):
    """A tuple would be unpacked along a batch of two: its first row as scores, its second as indices."""
    kind, others = unlike_indexers()
    message, forward = list(others.items())[number]
    model = build("deepseek_v32")
    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(ImportError, match=rf"DeepseekV32Indexer of transformers \S+ {message}"):
        apply_dsa(model)
    monkeypatch.undo()
    apply_dsa(model)  # nothing was applied before


@pytest.mark.parametrize(
    ("plan", "refused"),
    [
        ({"model.layers.*.self_attn.q_b_proj": "colwise"}, True),
        ({}, False),
        ({"model.layers.*.mlp.gate_proj": "colwise"}, False),
    ],
    ids=["heads", "nothing", "dense layers"],
)
def test_tensor_parallel_ranks_are_refused_where_heads_are_split(monkeypatch, plan, refused):
    """To transformers, ranks of experts are tensor parallel ranks; each of them may have all heads."""
    model = build("glm_moe_dsa")
    monkeypatch.setattr(model, "_tp_size", 2)
    monkeypatch.setattr(model, "_tp_plan", plan)
    if refused:
        with pytest.raises(ValueError, match=r"its heads are on several tensor parallel ranks.*ep_size"):
            apply_dsa(model, loss_coeff=0.1)
        apply_dsa(model)
    else:
        apply_dsa(model, loss_coeff=0.1)


def test_another_attention_set_later_is_refused():
    model = build("deepseek_v32")
    apply_dsa(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"attention 'sdpa' was set .*undo\(\)"):
        model(tokens())
    model.set_attn_implementation(NAME)
    model(tokens())


def test_dropout_set_later_is_refused():
    model = build("deepseek_v32")
    apply_dsa(model)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"layer 1 has been set to 0\.1"):
        model(tokens())
    model.eval()(tokens())


def attributes(model):
    return {name: {key: id(x) for key, x in vars(module).items()} for name, module in model.named_modules()}


def hooks_of(model):
    return [(len(x._forward_pre_hooks), len(x._forward_hooks)) for x in model.modules()]


def test_undo_leaves_nothing_behind():
    model = build("glm_moe_dsa sharing", attn_implementation="sdpa")
    before, hooks = attributes(model), hooks_of(model)
    in_use = apply_dsa(model, loss_coeff=0.5)
    model(tokens(), labels=tokens())
    in_use.undo()
    in_use.undo()
    assert attributes(model) == before
    assert hooks_of(model) == hooks
    assert model.config._attn_implementation == "sdpa"
    apply_dsa(model).undo()


def test_files_are_the_model_s_own(tmp_path):
    import transformers

    model = build("deepseek_v32").eval()
    expected = model(tokens()).logits
    keys = set(model.state_dict())
    apply_dsa(model, loss_coeff=0.5)
    assert set(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert close(loaded(tokens()).logits, expected)


def test_a_copy_has_losses_of_its_own():
    """A teacher that is called between a model's forward and its loss does not replace that loss."""
    model = build("glm_moe_dsa sharing")
    in_use = apply_dsa(model, loss_coeff=0.5)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    output = model(tokens(), labels=tokens(), use_cache=False)
    losses = in_use.losses
    of_other = other(tokens(), labels=tokens(), use_cache=False)
    assert in_use.losses is losses
    assert len(losses) == 2
    of_other.loss.backward()
    trained = [x.grad is not None for name, x in other.named_parameters() if ".indexer." in name]
    assert trained
    assert all(trained)
    assert all(x.grad is None for x in model.parameters())
    output.loss.backward()


def test_a_copy_computes_as_the_model_does():
    model = build("deepseek_v32").eval()
    expected = model(tokens()).logits
    in_use = apply_dsa(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert close(model(tokens()).logits, expected)
    assert not other(tokens()).logits.any()
    in_use.undo()
    assert not other(tokens()).logits.any()
