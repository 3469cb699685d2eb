"""A GLM-5 in miniature with LoRA, one training step: ``adapter_job.py PACKAGE FOLDER SWITCHES`` (JSON).

``PACKAGE`` is ``transformers`` (with PEFT), ``mcore-bridge`` or ``megatron-bridge``. ``transformers`` comes
first, and writes the model's and the adapters' weights into ``FOLDER``, which the others read. Each writes
its loss and the adapters' gradients into ``FOLDER/PACKAGE-RANK.pt``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAMES = {
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
    "wq_b": "linear_wq_b",
    "wk": "linear_wk",
    "weights_proj": "linear_weights_proj",
}
"""Adapted layers: names in transformers and in Megatron."""
INDEXER = ("linear_wq_b", "linear_wk", "linear_weights_proj")
RANK, ALPHA, LAYERS, ROWS = 4, 10, 2, 24
SIZES = {
    "index_n_heads": 8,
    "num_hidden_layers": LAYERS,
    "mlp_layer_types": ["dense"] * LAYERS,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
}
_LAYER = re.compile(r"layers\.(\d+)\..*?\.?(\w+)$")


def place(name: str) -> tuple[int, str] | None:
    """Return layer and Megatron's name of an adapted layer from the name of its module."""
    found = _LAYER.search(name)
    return (int(found[1]), NAMES.get(found[2], found[2])) if found else None


def batch() -> Tensor:
    """Return token ids ``[2, ROWS + 1]``."""
    return torch.randint(96, (2, ROWS + 1), generator=torch.Generator().manual_seed(1))


def transformers(folder: Path, coefficient: float, targets: list[str]) -> dict[str, Any]:
    """Train the model by transformers and PEFT; indexers, if there is a coefficient, by ``apply_dsa``."""
    import peft

    from mindspeed_dsa.transformers import apply_dsa
    from tests.hosts.transformers.models import build

    model = build("glm_moe_dsa", **SIZES)
    model.save_pretrained(folder)
    theirs = [name for name, ours in NAMES.items() if ours in targets]
    torch.manual_seed(2)
    # The matrix B is drawn, too: with zeros, A has no gradient.
    wanted = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, init_lora_weights=False, target_modules=theirs)
    adapted = peft.get_peft_model(model, wanted)
    learns = coefficient and not set(targets).isdisjoint(INDEXER)
    in_use = apply_dsa(model, loss_coeff=coefficient) if learns else None
    tokens = batch()
    logits = adapted(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    (loss if in_use is None else loss + coefficient * in_use.loss).backward()
    weights = {}
    for name, module in adapted.named_modules():
        if hasattr(module, "lora_A"):
            weights[place(name)] = (module.lora_A["default"].weight, module.lora_B["default"].weight)
    torch.save({key: (a.detach(), b.detach()) for key, (a, b) in weights.items()}, folder / "adapters.pt")
    return {"loss": loss.item(), "gradients": {key: (a.grad, b.grad) for key, (a, b) in weights.items()}}


def settings(ranks: int, coefficient: float) -> dict[str, Any]:
    """Return what both frameworks' configurations have beside the model's sizes."""
    return {
        "tensor_model_parallel_size": ranks,
        "sequence_parallel": ranks > 1,
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
        "dsa_indexer_loss_coeff": coefficient,
        "dsa_indexer_use_sparse_loss": True,
        "attention_softmax_in_fp32": True,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "cross_entropy_loss_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def mcore_bridge(folder: Path, config: dict[str, Any], targets: list[str]) -> Any:
    """Build the model with mcore-bridge, and wrap its layers with PEFT, as ms-swift does."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig

    of_model = hf_to_mcore_config(AutoConfig.from_pretrained(folder))
    others = {
        # It reads other fields of config.json for these two, which released files have.
        "moe_layer_freq": f"[0]*{LAYERS}",
        "dsa_indexer_rotary_interleaved": True,
        "moe_grouped_gemm": False,
        "overlap_p2p_comm": False,
    }
    config = ModelConfig(**{**of_model, **config, **others})
    (model,) = get_mcore_model(config)
    load(model, folder)
    wanted = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)
    return model, get_peft_model(model, wanted)


def megatron_bridge(folder: Path, config: dict[str, Any], targets: list[str]) -> Any:
    """Build the model with Megatron's own specification, and wrap its layers with Megatron-Bridge."""
    from megatron.bridge.peft.lora import LoRA
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = MLATransformerConfig(
        **config,
        experimental_attention_variant="dsa",
        num_layers=LAYERS,
        hidden_size=theirs["hidden_size"],
        ffn_hidden_size=theirs["intermediate_size"],
        num_attention_heads=theirs["num_attention_heads"],
        q_lora_rank=theirs["q_lora_rank"],
        kv_lora_rank=theirs["kv_lora_rank"],
        qk_head_dim=theirs["qk_nope_head_dim"],
        qk_pos_emb_head_dim=theirs["qk_rope_head_dim"],
        v_head_dim=theirs["v_head_dim"],
        dsa_indexer_n_heads=theirs["index_n_heads"],
        dsa_indexer_head_dim=theirs["index_head_dim"],
        dsa_indexer_topk=theirs["index_topk"],
        dsa_indexer_rope_first=True,
        dsa_indexer_normalised_query=True,
        dsa_indexer_k_norm_epsilon=1e-6,
        dsa_indexer_rope_interleaved=True,
        dsa_indexer_rotate_activation=False,
        rope_type="rope",
        rotary_scaling_factor=1.0,
        rotary_base=10000,
        multi_latent_attention=True,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=theirs["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=specs.get_transformer_block_with_experimental_attention_variant_spec(config),
        vocab_size=theirs["vocab_size"],
        max_sequence_length=ROWS,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    load(model, folder)
    LoRA(target_modules=targets, dim=RANK, alpha=ALPHA)([model], training=True)
    return model, model


def load(model: Any, folder: Path) -> None:
    """Read transformers' files by this package."""
    import mindspeed_dsa.weights

    mindspeed_dsa.weights.load([model], folder, model.config)


def matrices(model: Any) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Return the matrices A and B of every adapted layer."""
    found = {}
    for name, module in model.named_modules():
        if "lora_A" in module._modules:
            found[place(name)] = (module.lora_A["default"].weight, module.lora_B["default"].weight)
        elif "to_wrap" in module._modules:
            found[place(name)] = (module.adapter.linear_in.weight, module.adapter.linear_out.weight)
    return found


def part(whole: Tensor, like: Tensor, rank: int) -> Tensor:
    """Return this rank's part of a matrix, along the dimension in which ``like`` is smaller."""
    for dimension in range(2):
        if like.size(dimension) < whole.size(dimension):
            return whole.chunk(whole.size(dimension) // like.size(dimension), dim=dimension)[rank]
    return whole


def train(
    package: str, folder: Path, switches: dict[str, Any], coefficient: float, targets: list[str]
) -> Any:
    """Train the frameworks' model."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    import mindspeed_dsa
    from tests.hosts.frameworks import engine, stand_ins

    stand_ins.load(stand_ins.TRANSFORMER_ENGINE)
    engine.install()
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        "2.10.0" if name.replace("_", "-") == "transformer-engine" else version(name)
    )
    if switches:
        mindspeed_dsa.enable(
            experimental_attention_variant="dsa", dsa_indexer_loss_coeff=coefficient, **switches
        )
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    build = {"mcore-bridge": mcore_bridge, "megatron-bridge": megatron_bridge}[package]
    model, adapted = build(folder, settings(ranks, coefficient), targets)
    model.train()
    weights, found = torch.load(folder / "adapters.pt"), matrices(adapted)
    assert found.keys() == {key for key in weights if key[1] in targets}
    with torch.no_grad():
        for key, own in found.items():
            for matrix, whole in zip(own, weights[key], strict=True):
                matrix.copy_(part(whole, matrix, rank))
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )
    tokens = batch()
    positions = torch.arange(ROWS).expand(2, -1)
    loss = wrapped(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
    loss.backward()
    finalize_model_grads([wrapped], None)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or ".adapter." in name for name in trained), trained
    gradients = {key: tuple(matrix.main_grad.clone() for matrix in own) for key, own in found.items()}
    return {"loss": loss.item(), "gradients": gradients}


def main(package: str, folder: Path, asked: dict[str, Any]) -> None:
    """Train one step, and write the result."""
    if package == "transformers":
        result = transformers(folder, asked["coefficient"], asked["targets"])
    else:
        result = train(package, folder, asked["switches"], asked["coefficient"], asked["targets"])
    torch.save(result, folder / f"{package}-{os.environ.get('RANK', 0)}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
