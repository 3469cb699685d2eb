"""Models of Hugging Face's transformers beside Megatron's: sizes, names of weights, and a step of each."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.matrix import model as tiny
from tests.matrix.sharing_steps import communication
from tests.matrix.steps import job_of_any_release
from tests.support import model as job

DEEPSEEK, GLM = "DeepseekV32", "GlmMoeDsa"
EXPERTS, SAMPLES = 8, 4
EPSILON = 1e-6
"""Epsilon of all norms. Transformers gives it to those of the latent query and key and of the indexer's keys
whatever its configuration says, and Megatron has one for all."""
INDEX_HEADS, INDEX_WIDTH, ROTARY = 32, 16, 8
"""GLM has as many index heads. A sum over few is often exactly 0, and of keys with the same score
transformers takes any and Megatron the first; a sum over so many never is, and both take the same."""
INDEXER = {"dsa_indexer_rope_first": True, "dsa_indexer_normalised_query": True}
"""Options of both models, which releases before 0.19 follow only when told."""
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}


@dataclass(frozen=True)
class Model:
    """A model with random weights, as transformers has it and as Megatron does.

    Attributes:
        kind: transformers' name of it.
        layers: how many; the first is dense, and the others have experts.
        frequency, offset: which layers select keys, as Megatron counts them.
        pattern: a letter for each layer instead.
        yarn: rotary embeddings are stretched.
    """

    kind: str
    layers: int = 3
    frequency: int = 1
    offset: int = 0
    pattern: str = ""
    yarn: bool = False

    def __str__(self) -> str:
        shared = self.pattern or (f"{self.frequency}/{self.offset}" if self.frequency > 1 else "")
        return " ".join(filter(None, (self.kind, shared, "yarn" * self.yarn)))

    def theirs(self) -> Any:
        """Build it from transformers."""
        import transformers

        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
        if self.yarn:
            rope |= {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, **YARN}
        selections: dict[str, Any] = {}
        if self.pattern:
            selections = {"index_topk_pattern": self.pattern}
        elif self.kind == GLM:
            # Megatron reads an offset of 0 as 1; in transformers the first layer would have nothing to share.
            selections = {"index_topk_freq": self.frequency, "index_skip_topk_offset": max(self.offset, 1)}
        config = getattr(transformers, f"{self.kind}Config")(
            vocab_size=job.VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=EXPERTS,
            n_shared_experts=1,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=ROTARY,
            qk_nope_head_dim=8,
            v_head_dim=8,
            index_n_heads=INDEX_HEADS,
            index_head_dim=INDEX_WIDTH,
            index_topk=6,
            first_k_dense_replace=1,
            max_position_embeddings=64,
            rms_norm_eps=EPSILON,
            rope_parameters=rope,
            attn_implementation="eager",
            **selections,
        )
        return getattr(transformers, f"{self.kind}ForCausalLM")(config)

    def ours(self) -> dict[str, Any]:
        """Return what Megatron's configuration has to say for the same."""
        fields: dict[str, Any] = dict(INDEXER)
        if self.yarn:
            fields |= {"rope_type": "yarn", **_yarn()}
        if self.kind == GLM:
            fields |= {"dsa_indexer_rope_interleaved": True, "dsa_indexer_rotate_activation": False}
        if self.pattern:
            fields["dsa_indexer_topk_pattern"] = self.pattern
        elif self.frequency > 1:
            fields["dsa_indexer_topk_freq"] = self.frequency
            fields["dsa_indexer_skip_topk_offset"] = self.offset
        return {
            "num_layers": self.layers,
            "moe_layer_freq": [0] + [1] * (self.layers - 1),
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 4,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "normalization": "RMSNorm",
            "layernorm_epsilon": EPSILON,
            "dsa_indexer_n_heads": INDEX_HEADS,
            **fields,
        }


def _yarn() -> dict[str, Any]:
    """Return :data:`YARN` by Megatron's names, one of which older releases call otherwise."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    values: dict[str, Any] = dict(YARN)
    values["rotary_scaling_factor"] = values.pop("factor")
    if "original_max_position_embeddings" not in MLATransformerConfig.__dataclass_fields__:
        values["max_position_embeddings"] = values.pop("original_max_position_embeddings")
    return values


_LAYER = {
    "input_layernorm.weight": ["input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["post_attention_layernorm.weight"],
    "self_attention.linear_q_down_proj.weight": ["self_attn.q_a_proj.weight"],
    "self_attention.q_layernorm.weight": ["self_attn.q_a_layernorm.weight"],
    "self_attention.linear_q_up_proj.weight": ["self_attn.q_b_proj.weight"],
    "self_attention.linear_kv_down_proj.weight": ["self_attn.kv_a_proj_with_mqa.weight"],
    "self_attention.kv_layernorm.weight": ["self_attn.kv_a_layernorm.weight"],
    "self_attention.linear_kv_up_proj.weight": ["self_attn.kv_b_proj.weight"],
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "self_attention.core_attention.indexer.linear_wq_b.weight": ["self_attn.indexer.wq_b.weight"],
    "self_attention.core_attention.indexer.linear_wk.weight": ["self_attn.indexer.wk.weight"],
    "self_attention.core_attention.indexer.k_norm.weight": ["self_attn.indexer.k_norm.weight"],
    "self_attention.core_attention.indexer.k_norm.bias": ["self_attn.indexer.k_norm.bias"],
    "self_attention.core_attention.indexer.linear_weights_proj.weight": [
        "self_attn.indexer.weights_proj.weight"
    ],
    "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
    "mlp.router.weight": ["mlp.gate.weight"],
    "mlp.router.expert_bias": ["mlp.gate.e_score_correction_bias"],
    "mlp.experts.local_experts.*.linear_fc1.weight": ["mlp.experts.gate_up_proj[*]"],
    "mlp.experts.local_experts.*.linear_fc2.weight": ["mlp.experts.down_proj[*]"],
    "mlp.shared_experts.linear_fc1.weight": [
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ],
    "mlp.shared_experts.linear_fc2.weight": ["mlp.shared_experts.down_proj.weight"],
}
_NUMBER = r"(?<=\.)\d+(?=\.)"
_RULES = {
    "embedding.word_embeddings.weight": ["model.embed_tokens.weight"],
    "output_layer.weight": ["lm_head.weight"],
    "decoder.final_layernorm.weight": ["model.norm.weight"],
    **{
        f"decoder.layers.*.{ours}": [f"model.layers.*.{part}" for part in theirs]
        for ours, theirs in _LAYER.items()
    },
}
"""Names of Megatron, as its oldest release has them, and of transformers, whose rows one after another are
the same tensor; a star is a number, and in brackets the first index."""


def parts(name: str) -> list[tuple[str, int | None]]:
    """Return the tensors of transformers that make up one of Megatron's, with their first index or None.

    Raises:
        KeyError: no rule knows the name.
    """
    numbers = re.findall(_NUMBER, name)
    found = []
    for part in _RULES[re.sub(_NUMBER, "*", name)]:
        for number in numbers:
            part = part.replace("*", number, 1)
        tensor, _, index = part.rstrip("]").partition("[")
        found.append((tensor, int(index) if index else None))
    return found


def of_megatron(name: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return views of transformers' tensors, by their names, that make up the one of Megatron with a name."""
    return [tensors[theirs] if index is None else tensors[theirs][index] for theirs, index in parts(name)]


def of_transformers(model: Model, names: Collection[str]) -> dict[str, Any]:
    """Compute what transformers makes of the batch of :func:`step`, the mean loss over its tokens derived.

    Args:
        model: which one.
        names: of Megatron's parameters and router biases, all of them.

    Returns:
        ``logits`` ``[samples, length, vocabulary]``, and ``gradients`` by Megatron's names, without those of
        the indexer, through which transformers does not derive.

    Raises:
        AssertionError: the models do not have the same tensors.
    """
    theirs = model.theirs()
    tensors = {name: tensor.detach() for name, tensor in theirs.named_parameters()}
    tensors |= {name: tensor for name, tensor in theirs.named_buffers() if name.endswith("correction_bias")}
    named = {theirs for name in names for theirs, _ in parts(name)}
    assert named == tensors.keys(), f"only one of the models has {sorted(named ^ tensors.keys())}"
    for name in names:
        pieces = of_megatron(name, tensors)
        rows = [piece.size(0) for piece in pieces]
        weight = tiny.weight_of(name, [sum(rows), *pieces[0].shape[1:]])
        for piece, part in zip(pieces, weight.split(rows), strict=True):
            piece.copy_(part)
    with job_of_any_release(1, 0):
        tokens = job.samples(SAMPLES)
    logits = theirs(tokens[:, :-1], use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    derived = {name: tensor.grad for name, tensor in theirs.named_parameters() if tensor.grad is not None}
    return {
        "logits": logits.detach(),
        "gradients": {
            name: torch.cat(of_megatron(name, derived))
            for name in names
            if all(part in derived for part, _ in parts(name))
        },
    }


# -- what the ranks do --------------------------------------------------------------------------


def step(model: Model, switches: Mapping[str, Any], **layout: int) -> dict[str, Any]:
    """Run :func:`tiny.one_step` on the model.

    Returns:
        what that does, the names of its routers' ``biases``, and from ranks of the last stage ``logits``
        ``[samples, own positions, own vocabulary]``, with the rows' ``positions`` and the ``first`` token.
    """
    build, found = tiny.gpt_model, {"biases": list[str](), "logits": None}

    def gpt_model(*args: Any) -> Any:
        chunk = build(*args)
        for name, bias in _expert_biases(chunk).items():
            bias.copy_(tiny.weight_of(name, bias.shape))
            found["biases"].append(name)
        if chunk.post_process:
            chunk.output_layer.register_forward_hook(keep)
        return chunk

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> None:
        from megatron.core import parallel_state

        logits = output[0].detach().clone().transpose(0, 1)  # the loss is computed in its place
        first = parallel_state.get_tensor_model_parallel_rank() * logits.size(-1)
        found.update(logits=logits, positions=job.own_positions(), first=first)

    with job_of_any_release(layout.get("cp", 1), 0), mock.patch.object(tiny, "gpt_model", gpt_model):
        fields = {**model.ours(), **communication(**layout)}
        return tiny.one_step(dict(switches), fields, micro_batch_size=SAMPLES, **layout) | found


def _expert_biases(chunk: torch.nn.Module) -> dict[str, Tensor]:
    """Return what routers add to their scores before they choose, by global name."""
    with mock.patch.object(type(chunk), "named_parameters", type(chunk).named_buffers):
        return {name: bias for name, bias in job.global_names(chunk).items() if name.endswith("expert_bias")}
