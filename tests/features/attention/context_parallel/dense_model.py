"""Worker functions: steps of a dense model with grouped heads or latent attention, in any layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from tests.support import model as job

SEQUENCE = 24  # two chunks for each of two, three or four ranks
HEADS, GROUPS = 8, 2
COMMON: dict[str, Any] = {
    "num_layers": 2,
    **job.LAYERS,
    "masked_softmax_fusion": False,
}


def latent_config(**overrides: Any) -> Any:
    """Return a latent attention config with value heads twice as wide as kv_channels."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    values = {
        **job.LATENT,
        "num_attention_heads": HEADS,
        # Releases read YaRN's magnitude from different fields, even without YaRN.
        "rotary_scaling_factor": 1.0,
    }
    return MLATransformerConfig(**{**COMMON, **values, **overrides})


def grouped_config(**overrides: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = {"hidden_size": 64, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    return TransformerConfig(**{**COMMON, **values, **overrides})


def gpt_model(cfg: Any, vp_stage: int | None = None) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    # Older releases read the stage from global state; later ones take an argument.
    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    where = {"ignore_virtual": False, **stage} if stage else {}
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        cfg, use_transformer_engine=False, normalization="RMSNorm", **stage
    )
    model = GPTModel(
        config=cfg,
        transformer_layer_spec=spec,
        **job.ends(length=SEQUENCE, **where),
        **stage,
    )
    model.vp_stage = vp_stage
    job.fill_by_name(model)
    return model


@contextlib.contextmanager
def dense(attention: str, cp: int) -> Iterator[None]:
    """Make ``tests.support.model`` build a dense model inside the block."""
    build = latent_config if attention == "latent" else grouped_config

    def config(apply_rope_fusion: bool = False, **overrides: Any) -> Any:
        built = build(context_parallel_size=cp, **overrides)
        # Set here, because Megatron refuses it without Transformer Engine.
        built.apply_rope_fusion = apply_rope_fusion
        return built

    with (
        mock.patch.object(job, "SEQUENCE", SEQUENCE),
        mock.patch.object(job, "config", config),
        mock.patch.object(job, "gpt_model", gpt_model),
    ):
        yield


def switches(attention: str, cp: int, algorithm: str | None, degree: int | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "experimental_attention_variant": None,
        "transformer_impl": "local",
        "multi_latent_attention": attention == "latent",
        "context_parallel_size": cp,
    }
    if algorithm is not None:
        settings["context_parallel_algo"] = algorithm
    if degree is not None:
        settings["ulysses_degree_in_cp"] = degree
    return settings


def step(
    attention: str,
    cp: int = 1,
    algorithm: str | None = None,
    degree: int | None = None,
    num_microbatches: int = 2,
    more: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Run :func:`job.run` on consecutive microbatches of two sequences."""
    from mindspeed_dsa.ops.backend import calls

    before = calls().total()
    with dense(attention, cp), whole_keys_of_megatron(attention == "latent" and cp == 1):
        result = job.run(
            {**switches(attention, cp, algorithm, degree), **(more or {})},
            num_microbatches=num_microbatches,
            micro_batch_size=2,
            cp=cp,
            **arguments,
        )
    return {**result, "calls": calls().total() - before}


def step_in_parts(**arguments: Any) -> dict[str, Any]:
    """Run :func:`step` with latent attention on one rank and queries in two parts.

    Also returns the width of every query that was attended to.
    """
    from mindspeed_dsa.features.attention.context_parallel import core_attention, query_parts

    attended: list[int] = []
    attend = query_parts.attention_of_parts

    def noting(query: torch.Tensor, *rest: Any, **more: Any) -> Any:
        attended.append(query.size(-1))
        return attend(query, *rest, **more)

    with (
        dense("latent", 1),
        mock.patch.object(core_attention, "takes_parts", return_value=True),
        mock.patch.object(query_parts, "attention_of_parts", noting),
    ):
        result = job.run(
            switches("latent", 1, None, None), num_microbatches=2, micro_batch_size=2, **arguments
        )
    return {**result, "attended": attended}


@contextlib.contextmanager
def whole_keys_of_megatron(active: bool) -> Iterator[None]:
    """Let latent attention expand keys and values for all heads, as Megatron does, if ``active``."""
    from mindspeed_dsa.features.attention.context_parallel.core_attention import Plan

    with mock.patch.object(Plan, "takes_payload", False) if active else contextlib.nullcontext():
        yield


def in_one_group(ranks: list[dict[str, Any]], cp: int, tp: int) -> dict[str, Any]:
    """Return the loss over all context parallel ranks, and the gradients of one of them, after checking all
    equal.
    """
    # The ranks with context parallel rank 0.
    ours = [rank for number, rank in enumerate(ranks) if number // tp % cp == 0]
    for number, rank in enumerate(ranks):
        twin = ranks[number - number // tp % cp * tp]
        for name, gradient in rank["gradients"].items():
            assert torch.equal(gradient, twin["gradients"][name]), name
    # The losses of one tensor parallel rank on the last stage.
    losses = [rank["losses"] for number, rank in enumerate(ranks) if number % tp == 0 and rank["losses"]]
    return {
        "losses": [sum(parts) for parts in zip(*losses, strict=True)],
        "gradients": job.put_together(ours),
    }


def hybrid_groups(given_to_megatron: bool) -> list[list[int]]:
    """Return global ranks of the head exchange group and of the ring, and whether Megatron made both
    groups.
    """
    import torch.distributed as dist

    import mindspeed_dsa

    mindspeed_dsa.enable(**switches("grouped", 4, "hybrid_cp_algo", 2))
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(context_parallel_size=4)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    theirs = []
    if given_to_megatron:  # Megatron itself needs another package to make these groups.
        groups = [
            [dist.new_group([a, b]) for a, b in pairs] for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3)))
        ]
        rank = dist.get_rank()
        theirs = [groups[0][rank // 2], groups[1][rank % 2]]
    # Megatron never destroys these groups.
    kept = mock.patch.object(parallel_state, "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", theirs or None)
    with kept, dense("grouped", 4):
        layers = gpt_model(job.config()).decoder.layers
    strategies = [
        layer.self_attention.core_attention.dense_context_parallel_plan.strategy for layer in layers
    ]
    assert strategies[0]._heads is strategies[1]._heads, "one group for all layers"
    assert any(strategies[0]._heads is group for group in theirs) == given_to_megatron
    return [dist.get_process_group_ranks(group) for group in (strategies[0]._heads, strategies[0]._across)]
