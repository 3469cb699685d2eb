"""Checks that :func:`apply_dsa` runs: transformers release, model and device."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import nn

from mindspeed_dsa.integrations.transformers.families import FAMILIES, MISSING, Family
from mindspeed_dsa.integrations.transformers.layers import ATTRIBUTE, NAME, LossLayers
from mindspeed_dsa.ops.backend import BackendUnavailable, ShapeClass, check_name, choose
from mindspeed_dsa.ops.lightning_indexer import OPERATOR

RELEASES = SpecifierSet(">=5.20,<6")
"""Releases of transformers with the layer interface that :mod:`.layers` uses."""
_WHO = "mindspeed_dsa.integrations.transformers.apply_dsa(model)"
_LOADED_WITH = ("eager", "sdpa")
_DEVICES = ("cpu", "cuda", "npu")


def family_of(model: nn.Module) -> tuple[Any, Family]:
    """Return the transformers model inside ``model``, which may be a wrapper, and its family.

    Raises:
        ImportError: transformers is missing or of another release.
        ValueError: ``model`` contains no supported model, or several.
    """
    _check_release()
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    served = ", ".join(FAMILIES)
    if not models:
        raise ValueError(
            f"{_WHO}: {type(model).__name__} has no model of transformers in it; give it one of {served}"
        )
    # A transformers model contains its base model; count only the outermost ones.
    inner = {id(part) for whole in models for part in whole.modules() if part is not whole}
    outer = [whole for whole in models if id(whole) not in inner]
    if len(outer) > 1:
        raise ValueError(
            f"{_WHO}: {type(model).__name__} has {len(outer)} models of transformers in it "
            f"({', '.join(type(whole).__name__ for whole in outer)}); call apply_dsa() with each to be served"
        )
    kind = models[0].config.model_type
    if kind not in FAMILIES:
        lack = f"for which these operators lack {MISSING[kind]}" if kind in MISSING else ""
        raise ValueError(
            f"{_WHO}: {type(models[0]).__name__} is of type {kind!r}, "
            f"{lack or 'whose attention these operators do not know'}; they serve {served}. "
            "The operators themselves take tensors: docs/hosts/operators.md"
        )
    return models[0], FAMILIES[kind]


def _check_release() -> None:
    try:
        release = version("transformers")
    except PackageNotFoundError:
        raise ImportError(
            f"{_WHO}: transformers is not installed; pip install 'mindspeed_dsa[transformers]'"
        ) from None
    if not RELEASES.contains(release, prereleases=True):
        raise ImportError(
            f"{_WHO}: transformers {release} is not one of {RELEASES}, for whose "
            f"models this is written; pip install 'transformers{RELEASES}'"
        )


def check(
    model: Any,
    attentions: dict[str, Any],
    groups: list[list[int]],
    backend: str,
    with_loss: bool,
    loss_layers: LossLayers = "own",
) -> None:
    """Raise unless the model is supported in its current state.

    Args:
        model: transformers model.
        attentions: dict from name to attention layer.
        groups: numbers of the layers that use each indexer's selection.
        backend: requested backend.
        with_loss: whether the indexer loss is requested.
        loss_layers: layers whose attention an indexer learns from.

    Raises:
        ValueError: the message lists every problem, with a remedy.
        BackendUnavailable: the requested backend cannot run on the model's device.
    """
    check_name(OPERATOR, backend)
    problems = list(_problems(model, attentions, groups, with_loss))
    if loss_layers != "own":
        problems += _problems_of_serving(groups, with_loss, loss_layers)
    if problems:
        raise ValueError("\n".join(f"{_WHO}: {problem}" for problem in problems))
    for attention in attentions.values():
        for name, parameter in attention.named_parameters():
            device = parameter.device.type
            if device == "meta":  # materialised later, by FSDP or by accelerate's hooks
                continue
            if device not in _DEVICES and backend == "auto":
                raise BackendUnavailable(
                    f"{_WHO}: {name} is on {device!r}, for which there is no backend; move the model to one "
                    f"of {', '.join(_DEVICES)}, or take the slow and exact backend='reference'"
                )
            if backend != "auto":
                config = model.config.get_text_config()
                sizes = (
                    ("heads", config.index_n_heads),
                    ("head_dim", config.index_head_dim),
                    ("topk", config.index_topk),
                )
                choose(OPERATOR, backend, ShapeClass.of(parameter, *sizes))
            return


def _problems(
    model: Any, attentions: dict[str, Any], groups: list[list[int]], with_loss: bool
) -> Iterator[str]:
    """Yield every reason why the model is not supported in its current state."""
    implementation = model.config.get_text_config()._attn_implementation
    if any(hasattr(attention, ATTRIBUTE) for attention in attentions.values()):
        yield "the operators are in use already; call undo() of what the first apply_dsa() returned"
        return
    if implementation == NAME:
        yield (
            f"its configuration has attention {NAME!r} and none of its layers has the operators: either it "
            "shares the object model.config with a model in use, and wants a copy.deepcopy() of it when it "
            "is built, or it was loaded with that name; load it with attn_implementation='sdpa' or 'eager'"
        )
    elif implementation not in _LOADED_WITH:
        yield (
            f"the model was loaded with attention {implementation!r}, which was asked for; load it with "
            f"attn_implementation='sdpa' or 'eager', which {NAME!r} then takes the place of"
        )
    if not groups:
        yield f"{type(model).__name__} has no attention layer with an indexer that this release is known for"
    for name, attention in attentions.items():
        if attention.attention_dropout:
            yield (
                f"{name} has attention_dropout {attention.attention_dropout}, and the operators have no "
                "dropout; load the model with attention_dropout=0.0"
            )
            break
    quantised = [
        f"{name}.{part}"
        for name, attention in attentions.items()
        for part, parameter in attention.named_parameters()
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2
    ]
    if quantised or getattr(model, "is_quantized", False):
        what = f"{quantised[0]} and {len(quantised) - 1} more weights are" if quantised else "the model is"
        yield (
            f"{what} quantised; the operators, and the indexer's training, want bf16, fp16 or fp32. Load it "
            "dequantised (for FP8: quantization_config=FineGrainedFP8Config(dequantize=True)), or without "
            "apply_dsa() for inference"
        )
    if with_loss and _splits_heads(model):
        yield (
            "its heads are on several tensor parallel ranks, and the indexer's loss is of all heads; load it "
            "with fsdp_size, and ep_size for its experts, in place of tp_size, or take loss_coeff=0"
        )


def _problems_of_serving(groups: list[list[int]], with_loss: bool, loss_layers: LossLayers) -> Iterator[str]:
    """Yield the reasons why indexers cannot learn from all layers that they serve."""
    option = f"indexer_loss_layers={loss_layers!r}"
    if all(len(group) == 1 for group in groups):
        yield (
            f"{option} trains indexers for layers that share their selections, and in this model no layer "
            "does (indexer_types of its configuration); take indexer_loss_layers='own'"
        )
    if not with_loss:
        yield f"{option} needs the indexers' loss, and loss_coeff is 0; give a positive loss_coeff"


def _splits_heads(model: Any) -> bool:
    """Return whether the tensor parallel plan splits attention heads, not only experts."""
    rules = getattr(model, "tp_plan", None) or {}
    return (getattr(model, "tp_size", None) or 1) > 1 and any(".self_attn." in rule for rule in rules)


def check_indexer(model: Any, family: Family) -> None:
    """Check the interface of transformers' indexer by calling it on meta tensors, as the attention does.

    Raises:
        ImportError: the indexer returns anything but indices, so that our replacement would not fit.
    """
    rows, kind = (1, 2), family.named(family.indexer)
    indexers = [module for module in model.modules() if isinstance(module, kind)]
    if not indexers:
        return
    config = indexers[0].config
    # Tensors on the meta device have shapes and dtypes but no memory.
    problem = ""
    with torch.device("meta"), torch.no_grad():
        inputs = {
            "hidden_states": torch.empty(*rows, config.hidden_size),
            "q_resid": torch.empty(*rows, getattr(config, "q_lora_rank", None) or 1),
            "position_embeddings": (torch.empty(*rows, config.qk_rope_head_dim),) * 2,
            "attention_mask": torch.ones(*rows, rows[1], dtype=torch.bool),
            "position_ids": torch.ones(rows, dtype=torch.long),
        }
        try:
            indices = kind(config, indexers[0].layer_idx)(*(inputs[name] for name in family.arguments))
        except Exception as error:
            problem = f"cannot be called as in these releases ({type(error).__name__}: {error})"
        else:
            if not isinstance(indices, torch.Tensor):
                problem = f"returns {type(indices).__name__} where indices alone are known"
            elif indices.dtype != torch.int32 or indices.shape[:2] != rows:
                problem = (
                    f"returns {indices.dtype} {list(indices.shape)} where int32 [batch, rows, topk] is known"
                )
    if problem:
        raise ImportError(
            f"{_WHO}: the {kind.__name__} of transformers {version('transformers')} {problem}; install a "
            "release that docs/hosts/transformers.md lists as tried, or train without apply_dsa()"
        )
