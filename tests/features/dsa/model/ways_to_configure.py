"""Worker functions: DSA model configs, made in the ways in which jobs make them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any
from unittest import mock

from mindspeed_dsa.features.dsa.model.feature import FLAGS
from mindspeed_dsa.megatron.dsa import SIZES
from tests.support import model as tiny
from tests.support.model import error_of

NAMES = [flag.dest for flag in FLAGS]


def fields_of(cfg: Any) -> dict[str, Any]:
    return {name: getattr(cfg, name) for name in NAMES}


def made(switches: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config as made, as copied, and of a derived class."""
    import mindspeed_dsa

    mindspeed_dsa.enable(experimental_attention_variant="dsa", **switches)
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    cfg = tiny.config(**overrides)

    @dataclasses.dataclass
    class Derived(MLATransformerConfig):
        mine: int = 9

    base = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg) if field.init}
    # Our fields are left out unless the caller gives them, so that the class sets them.
    unsaid = {name: value for name, value in base.items() if name not in NAMES or name in overrides}
    plain = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    return {
        "made": fields_of(cfg),
        "copied": fields_of(dataclasses.replace(cfg, layernorm_epsilon=1e-4)),
        "derived": fields_of(Derived(**unsaid)),
        "other": fields_of(plain),
        "sizes": {name: getattr(cfg, name) for name in SIZES},
        "listed": [
            {*NAMES} <= {field.name for field in dataclasses.fields(kind)}
            for kind in (MLATransformerConfig, TransformerConfig)
        ],
    }


def refused(switches: Mapping[str, Any], overrides: Mapping[str, Any]) -> str:
    """Return the error message of an invalid config."""
    return error_of(f"{__name__}:made", switches=switches, overrides=overrides)


def parsed(line: str, switches: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return arguments that Megatron-LM's parser reads, also by its generated flags if it has any."""
    import mindspeed_dsa

    mindspeed_dsa.enable(experimental_attention_variant="dsa", **(switches or {}))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    try:
        from megatron.core.transformer.transformer_config import TransformerConfig
        from megatron.training.argument_utils import ArgumentGroupFactory
    except ImportError:
        pass  # before 0.16 flags are written by hand, and a wheel has no parser
    else:
        factory = ArgumentGroupFactory(TransformerConfig)
        # Only flags of our fields are generated.
        kept = {field.name for field in dataclasses.fields(TransformerConfig)} - {*NAMES}
        factory.exclude |= kept
        factory.build_group(parser)
    mindspeed_dsa.add_arguments(parser)
    namespace = vars(parser.parse_args(line.split()))
    return {name: namespace[name] for name in NAMES}


def key_norm() -> dict[str, Any]:
    """Return a bf16 indexer's key norm in fp32, and the compute dtypes without and with the option."""
    import torch

    from tests.matrix import model as any_release

    tiny.start()
    local = {"transformer_impl": "local"} if "transformer_impl" in _known() else {}
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, **local}
    results: dict[str, Any] = {"types": []}
    for fp32 in (False, True):
        cfg = any_release.config(dsa_indexer_k_norm_fp32=fp32, dsa_indexer_k_norm_epsilon=1e-6, **bf16)
        indexer = any_release.gpt_model(cfg).decoder.layers[0].self_attention.core_attention.indexer
        norm = indexer.k_norm.bfloat16()
        with torch.no_grad():
            norm.bias.copy_(torch.randn(norm.bias.shape, generator=torch.Generator().manual_seed(2)))
        key = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
        layer_norm = torch.nn.functional.layer_norm
        with mock.patch("torch.nn.functional.layer_norm", wraps=layer_norm) as watched:
            results["out"] = norm(key).detach()
        results["types"].append(watched.call_args.args[0].dtype)
    return {**results, "key": key, "weight": norm.weight.detach(), "bias": norm.bias.detach()}


def _known() -> set[str]:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return {field.name for field in dataclasses.fields(MLATransformerConfig)}
