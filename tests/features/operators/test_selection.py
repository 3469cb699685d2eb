"""Selection of fused operators, refused settings, and caching of rotary tables."""

from __future__ import annotations

import functools
import gc
from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa import SettingsError, features, platforms, settings
from mindspeed_dsa.features.operators.fused import feature as selection
from mindspeed_dsa.features.operators.fused import functions
from mindspeed_dsa.features.operators.fused.feature import OPERATORS
from mindspeed_dsa.features.operators.fused.functions import fill_by_mask, fuse_swiglu, fuse_weighted_swiglu

NAMES = {
    "rmsnorm": "fused-rmsnorm",
    "rotary-pos-emb": "fused-rotary-pos-emb",
    "swiglu": "fused-swiglu",
    "mask-arithmetic": "mask-arithmetic",
}
FEATURES = {feature.name: feature for feature in features.built_in() if feature.name in NAMES.values()}


def active(*argv: str, platform: str = "cpu") -> set[str]:
    resolved = settings.read(features.all_flags(), argv=argv, environ={})
    resolved.platform = platform
    return {name for name, feature in FEATURES.items() if feature.is_active(resolved)}


def test_switches_and_list_add_up():
    assert set(NAMES) == set(OPERATORS)
    assert active() == active("--fused-operators", "none") == set()
    assert active("--fused-operators", "all") == set(NAMES.values())
    for operator, name in NAMES.items():
        assert active("--fused-operators", operator) == {name}
        if name != operator:
            assert active(f"--use-{name}") == {name}
    assert active("--use-fused-swiglu", "--fused-operators", "rmsnorm") == {"fused-swiglu", "fused-rmsnorm"}


def test_an_npu_fills_by_mask_unless_it_is_told_not_to():
    on_npu = functools.partial(active, platform="npu")
    assert on_npu() == {"mask-arithmetic"}
    assert on_npu("--fused-operators", "rmsnorm") == {"mask-arithmetic", "fused-rmsnorm"}
    assert on_npu("--fused-operators", "none") == set()
    assert active(platform="cuda") == set()


@pytest.mark.parametrize("source", ["argv", "environment", "API"])
def test_an_unknown_name_is_answered_with_the_nearest(source):
    sources = {
        "argv": {"argv": ["--fused-operators", "rmsnorm", "swiglo"]},
        "environment": {"environ": {"MINDSPEED_DSA_FUSED_OPERATORS": "rmsnorm swiglo"}},
        "API": {"api": {"fused_operators": ["rmsnorm", "swiglo"]}},
    }
    with pytest.raises(
        SettingsError, match=r"invalid choice: 'swiglo'; did you mean swiglu\? choose from all"
    ):
        settings.read(features.all_flags(), **{"environ": {}, **sources[source]})


def problems(name: str, **given):
    args = SimpleNamespace(
        **{"normalization": "RMSNorm", "swiglu": True, "transformer_impl": "local", **given}
    )
    return list(FEATURES[name].problems(args))


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        (
            "fused-rmsnorm",
            {"use_fused_rmsnorm": True, "normalization": "LayerNorm"},
            "the model has LayerNorm",
        ),
        (
            "fused-rmsnorm",
            {"fused_operators": ["rmsnorm"], "transformer_impl": "transformer_engine"},
            "Transformer Engine's, which are fused already",
        ),
        ("fused-swiglu", {"use_fused_swiglu": True, "swiglu": False}, "needs --swiglu"),
        (
            "fused-swiglu",
            {"use_fused_swiglu": True, "use_te_activation_func": True},
            "two kernels for the same",
        ),
        (
            "fused-rotary-pos-emb",
            {"use_fused_rotary_pos_emb": True, "position_embedding_type": "learned_absolute"},
            "the model has learned_absolute",
        ),
        (
            "fused-rmsnorm",
            {"use_fused_rmsnorm": True, "fused_operators": ["none"]},
            "none contradicts --use-fused-rmsnorm",
        ),
        (
            "mask-arithmetic",
            {"fused_operators": ["none", "mask-arithmetic"]},
            "none contradicts mask-arithmetic in the same",
        ),
    ],
)
def test_what_contradicts_the_model_is_refused(name, given, problem):
    (message,) = problems(name, **given)
    assert problem in message
    # With `all`, the operators that do not apply are skipped, because nothing requested them by name.
    if "none" not in given.get("fused_operators", ()):
        named = {key: value for key, value in given.items() if not key.startswith(("use_fused", "fused_op"))}
        assert problems(name, **named, fused_operators=["all"]) == []


def test_all_and_none_is_said_once_without_names_that_nobody_wrote():
    names = ("mask-arithmetic", "fused-rmsnorm", "fused-rotary-pos-emb", "fused-swiglu")
    found = [text for name in names for text in problems(name, fused_operators=["all", "none"])]
    assert found == ["--fused-operators has both all and none; drop one of them"]


def test_gpus_need_the_library(monkeypatch):
    monkeypatch.setattr(platforms, "current", lambda: SimpleNamespace(name="cuda"))
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    for name in ("fused-rmsnorm", "fused-swiglu"):
        (problem,) = problems(name, fused_operators=["all"])
        assert "pip install 'mindspeed_dsa[liger]'" in problem
    assert problems("fused-rotary-pos-emb", fused_operators=["all"]) == []


def test_megatrons_own_rotary_fusion_gives_way():
    args = SimpleNamespace(apply_rope_fusion=True)
    (said,) = FEATURES["fused-rotary-pos-emb"].rewrite(args)
    assert "takes the place of Megatron's" in said
    assert args.apply_rope_fusion is False
    assert FEATURES["fused-rotary-pos-emb"].rewrite(args) == ()


def test_tables_are_made_once_and_anew_when_angles_change(monkeypatch):
    made = []
    make = functions.rotation
    monkeypatch.setattr(functions, "rotation", lambda *args: made.append(args) or make(*args))
    rotate = functions.rotate_fused(lambda *args, **kwargs: "Megatron's")
    angles, tensor = torch.randn(9, 1, 1, 8), torch.randn(6, 2, 3, 8)
    first = rotate(tensor, angles[:6])
    assert rotate(tensor, angles[0:6]).equal(first)
    assert len(made) == 1
    assert not rotate(tensor, angles[3:9]).equal(first)
    rotate(tensor.bfloat16(), angles[:6])
    rotate(tensor, angles[:6], mscale=1.5)
    assert len(made) == 4
    angles.mul_(2)
    assert not rotate(tensor, angles[:6]).equal(first)
    assert len(made) == 5
    # Tables cached in an evaluation must work in training.
    with torch.inference_mode():
        evaluated = rotate(tensor, angles[1:7])
    leaf = tensor.clone().requires_grad_()
    trained = rotate(leaf, angles[1:7])
    trained.sum().backward()
    assert trained.equal(evaluated)
    assert len(made) == 6
    # By position and by both names; other arguments go to Megatron.
    latent = rotate(tensor, angles[:6], False, True)
    assert rotate(tensor, angles[:6], multi_latent_attention=True).equal(latent)
    assert rotate(tensor, angles[:6], mla_rotary_interleaved=True).equal(latent)
    assert rotate(tensor, angles[:6], True, True) == "Megatron's"
    assert rotate(tensor, angles[:6], False, False, 1.0, True) == "Megatron's"
    assert rotate(tensor, angles[:6], inverse=True) == "Megatron's"
    assert rotate(tensor, angles[:6].requires_grad_()) == "Megatron's"
    tables = rotate.__closure__
    assert tables is not None
    (cache,) = [cell.cell_contents for cell in tables if isinstance(cell.cell_contents, functions._Rotations)]
    assert len(cache._of) == 1
    made.clear()
    del angles
    gc.collect()
    assert len(cache._of) == 0, "tables outlive their angles"


def test_what_is_kept_or_clamped_otherwise_stays_megatrons():
    plain = fuse_swiglu(lambda *args, **kwargs: "Megatron's")
    weighted = fuse_weighted_swiglu(lambda *args, **kwargs: "Megatron's")
    rows, probs = torch.randn(3, 8), torch.rand(3, 1)
    assert plain(rows, None, False, False).shape == weighted(rows, None, probs, False).shape == (3, 4)
    for more in (((True,), {}), ((False, True), {}), ((False,), {"clamp_value": 0.0})):
        assert plain(rows, None, *more[0], **more[1]) == "Megatron's"
        assert weighted(rows, None, probs, *more[0], **more[1]) == "Megatron's"
    assert weighted(rows, torch.zeros(8), probs) == "Megatron's"


def test_only_numbers_through_masks_of_whole_rows_are_filled():
    def assign(tensor, index, value):
        tensor[index] = value
        return tensor

    ours = fill_by_mask(assign)
    mask = torch.tensor([True, False, True])
    for index in (mask, (mask, slice(None)), (mask, 0), 1, torch.tensor([0, 2]), torch.ones(3, 2).bool()):
        for value in (7.0, torch.tensor(3.0)):
            start = torch.tensor([[torch.inf, 1.0], [torch.nan, 2.0], [3.0, -torch.inf]])
            expected = assign(start.clone(), index, value)
            torch.testing.assert_close(
                ours(start.clone(), index, value), expected, equal_nan=True, rtol=0, atol=0
            )
