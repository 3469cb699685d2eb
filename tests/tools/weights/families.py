"""Models without latent attention: as transformers writes them, and a few steps in any layout.

Functions with ``layout`` run inside the pool's workers.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa import log
from mindspeed_dsa.features.checkpoints.hugging_face import config, loading, rotary
from tests.matrix.hugging_face import poison
from tests.support import model as job

LENGTH, BATCH, STEPS, RATE = 24, 4, 10, 0.03
"""Two chunks of a sequence for each of two context parallel ranks, and two microbatches of two."""
_SIZES: dict[str, Any] = {
    "vocab_size": job.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 200000.0, **rotary.LLAMA_3}
"""Llama 3's rotary embeddings. Wavelengths of a head of 8 are 6, 133, 2,810 and 59,424, in all ranges."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "llama": ("Llama", {"rope_parameters": LLAMA_3, "head_dim": 8, "max_position_embeddings": 65536}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 6}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2}),
}
"""Prefix of transformers' classes, and sizes."""


def write(kind: str, folder: Path, **changed: Any) -> Any:
    """Write a model with random weights in fp32, and return it.

    Args:
        kind: ``model_type``.
        folder: folder for the files, which this function creates.
        changed: instead of its sizes.
    """
    import transformers

    name, sizes = MODELS[kind]
    described = getattr(transformers, f"{name}Config")(
        **_SIZES | sizes | changed, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(described)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Biases and norms of transformers' are all alike, which would hide one in another's place.
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


def logits_of(model: Any) -> tuple[Tensor, Tensor]:
    """Return transformers' logits ``[batch, length, vocabulary]`` for a step's tokens, and the labels."""
    with mock.patch.object(job, "SEQUENCE", LENGTH):
        tokens = job.samples(BATCH)
    return model(tokens[:, :-1], use_cache=False).logits, tokens[:, 1:]


def loss_of(model: Any) -> Tensor:
    """Return transformers' mean loss over the tokens of a step."""
    logits, labels = logits_of(model)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def losses_of(model: Any) -> list[float]:
    """Take steps of gradient descent with transformers' model; return the losses, one more than steps."""
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model)
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.grad is not None:  # experts that no token chose
                    weight -= RATE * weight.grad
                    weight.grad = None
        losses.append(float(loss))
    return [*losses, float(loss_of(model))]


def train(files: str, checkpoint: str, saved: str, grouped: bool = False, **layout: int) -> Any:
    """Read a model, take the steps of :func:`losses_of`, and save a checkpoint.

    Args:
        files: folder of the model, whose weights are read first.
        checkpoint: folder of the same weights, imported; read once more, and compared.
        saved: folder of the checkpoint that is written; empty: none.
        grouped: run experts as grouped matrix multiplications.
        layout: sizes of the groups of ranks.

    Returns:
        Losses on the last stage, and names of weights that differ between files and checkpoint.
    """
    with mock.patch.object(job, "SEQUENCE", LENGTH):
        job.start(_switches(grouped, layout), **layout)
        values = config.arguments_of(config.read_config(Path(files), "test"), "test")
        cfg = _config(values, grouped, layout)
        chunks = [_chunk(cfg, values, stage) for stage in _stages(layout)]
        for chunk in chunks:
            poison(chunk)
        loading.load(chunks, Path(files), Namespace(**values), log.get())
        differing = _differing(chunks, checkpoint)
        losses = _losses(cfg, chunks)
        if saved:
            _save(chunks, values, Path(saved))
        return losses, differing


def _switches(grouped: bool, layout: Mapping[str, int]) -> dict[str, Any]:
    switches: dict[str, Any] = {
        "experimental_attention_variant": None,
        "transformer_impl": "local",
        "multi_latent_attention": False,
    }
    if layout.get("cp", 1) > 1:
        switches["context_parallel_size"] = layout["cp"]
    return switches | ({"moe_grouped_gemm": True} if grouped else {})


def _stages(layout: Mapping[str, int]) -> list[int | None]:
    return list(range(layout["vpp"])) if "vpp" in layout else [None]


def _config(values: Mapping[str, Any], grouped: bool, layout: Mapping[str, int]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    more = {
        "num_moe_experts": values["num_experts"],
        "layernorm_epsilon": values["norm_epsilon"],
        "moe_grouped_gemm": grouped,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "transformer_impl": "local",
        "masked_softmax_fusion": False,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": layout.get("tp", 1),
        "sequence_parallel": layout.get("tp", 1) > 1,
        "pipeline_model_parallel_size": layout.get("pp", 1),
        "virtual_pipeline_model_parallel_size": layout.get("vpp"),
        "context_parallel_size": layout.get("cp", 1),
        "expert_model_parallel_size": layout.get("ep", 1),
        "expert_tensor_parallel_size": layout.get("etp", layout.get("tp", 1)),
        "overlap_p2p_comm": "vpp" in layout,
        "batch_p2p_comm": "vpp" not in layout,
    }
    known = {name: value for name, value in {**values, **job.LAYERS}.items() if name in fields}
    known["ffn_hidden_size"] = values["ffn_hidden_size"]
    return TransformerConfig(**{**known, **more})


def _chunk(cfg: Any, values: Mapping[str, Any], stage: int | None) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    at = {} if stage is None else {"vp_stage": stage}
    where = {"ignore_virtual": False, **at} if at else {}
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(cfg, False, normalization="RMSNorm", **at)
    model = GPTModel(
        config=cfg,
        transformer_layer_spec=spec,
        rotary_base=values["rotary_base"],
        rope_scaling=values.get("use_rope_scaling", False),
        share_embeddings_and_output_weights=not values["untie_embeddings_and_output_weights"],
        **job.ends(length=LENGTH, **where),
        **at,
    )
    model.vp_stage = stage
    return model


def _differing(chunks: list[Any], checkpoint: str) -> list[str]:
    """Read the imported checkpoint as well; return the names of weights that differ."""
    from megatron.core import dist_checkpointing

    first = [{name: weight.clone() for name, weight in chunk.named_parameters()} for chunk in chunks]
    assert not any(weight.isnan().any() for weights in first for weight in weights.values())
    for chunk in chunks:
        poison(chunk)
    loaded = dist_checkpointing.load(_sharded(chunks), checkpoint)
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"])
    return [
        name
        for chunk, weights in zip(chunks, first, strict=True)
        for name, weight in chunk.named_parameters()
        if not torch.equal(weight, weights[name])
    ]


def _sharded(chunks: list[Any]) -> dict[str, Any]:
    from megatron.core import parallel_state

    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {
        f"model{index}": chunk.sharded_state_dict(metadata={"dp_cp_group": replicas})
        for index, chunk in enumerate(chunks)
    }


def _losses(cfg: Any, chunks: list[Any]) -> list[float]:
    """Take the steps; return the mean losses over all ranks, which only the last stage has."""
    from megatron.core import parallel_state

    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    microbatches = BATCH // ranks // (2 if cfg.pipeline_model_parallel_size > 1 else 1)
    mine = job.samples(BATCH).view(ranks, -1, microbatches, LENGTH + 1)[rank]
    losses = []
    for step in range(STEPS + 1):
        reported = job.train_step(cfg, chunks, list(mine))
        if reported:
            loss = torch.stack([each["lm loss"] for each in reported]).mean()
            # Context parallel ranks have parts of each loss.
            dist.all_reduce(loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            losses.append(float(loss / ranks))
        if step < STEPS:
            with torch.no_grad():
                for weight in (weight for chunk in chunks for weight in chunk.parameters()):
                    weight -= RATE * weight.main_grad
    return losses


def _save(chunks: list[Any], values: Mapping[str, Any], folder: Path) -> None:
    from dsa_job.torch_dist import save_in_this_process
    from megatron.core import dist_checkpointing

    folder.mkdir(exist_ok=True)
    dist.barrier()
    args = Namespace(**values, padded_vocab_size=job.VOCABULARY)
    dist_checkpointing.save({**_sharded(chunks), "args": args}, str(folder), save_in_this_process())
