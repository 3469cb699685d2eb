"""Hugging Face transformers models and their Megatron equivalents: sizes, weight names, and a step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa import log
from mindspeed_dsa.features.checkpoints.hugging_face import loading
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import of_class
from mindspeed_dsa.features.checkpoints.hugging_face.names import Place, Shape
from mindspeed_dsa.runs.files import RunError
from tests.matrix import model as tiny
from tests.matrix.sharing_steps import communication
from tests.matrix.steps import EXPERT_SIZES, job_of_any_release
from tests.support import model as job

DENSE, DEEPSEEK, GLM = "DeepseekV3", "DeepseekV32", "GlmMoeDsa"
EXPERTS, SAMPLES = 8, 4
EPSILON = 1e-6
"""Epsilon of all norms. Transformers hard-codes it for the norms of the latent query, latent key and index
keys, and Megatron has a single epsilon.
"""
INDEX_HEADS, INDEX_WIDTH, ROTARY = 32, 16, 8
"""Sizes of the index heads; GLM also has 32. A sum over few heads is often exactly 0, and transformers and
Megatron break ties differently. A sum over 32 heads is never exactly 0.
"""
INDEXER = {
    "dsa_indexer_rope_first": True,
    "dsa_indexer_normalised_query": True,
    "dsa_indexer_n_heads": INDEX_HEADS,
}
"""Options of both models. Releases before 0.19 need the first two set explicitly."""
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}


@dataclass(frozen=True)
class Model:
    """A model with random weights that transformers and Megatron can both build.

    Attributes:
        kind: transformers' name of the architecture.
        layers: number of layers; the first is dense, and the others have experts.
        frequency, offset: rule for the layers that select keys, in Megatron's counting.
        pattern: letters for the layers, instead of the rule.
        yarn: whether rotary embeddings use YaRN.
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

    def theirs(self, **others: Any) -> Any:
        """Build the transformers model; ``others`` override its configuration."""
        import transformers

        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
        if self.yarn:
            rope |= {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, **YARN}
        selections: dict[str, Any] = {}
        if self.kind != DENSE:
            selections = {"index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_WIDTH, "index_topk": 6}
        if self.pattern:
            selections["index_topk_pattern"] = self.pattern
        elif self.kind == GLM:
            # Megatron reads an offset of 0 as 1; in transformers the first layer would have nothing to share.
            selections["index_topk_freq"] = self.frequency
            selections["index_skip_topk_offset"] = max(self.offset, 1)
        values: dict[str, Any] = dict(
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
            first_k_dense_replace=1,
            max_position_embeddings=64,
            rms_norm_eps=EPSILON,
            rope_parameters=rope,
            attn_implementation="eager",
            **selections,
        )
        config = getattr(transformers, f"{self.kind}Config")(**values | others)
        return getattr(transformers, f"{self.kind}ForCausalLM")(config)

    def shape(self) -> Shape:
        """Return the table of the model's tensors."""
        fields = {"experimental_attention_variant": "dsa", "q_lora_rank": 24} | self.ours()
        table = of_class({"architectures": [f"{self.kind}ForCausalLM"]})
        return Shape.of(SimpleNamespace(**fields, moe_shared_expert_intermediate_size=16), table)

    def ours(self) -> dict[str, Any]:
        """Return the equivalent fields of Megatron's configuration."""
        fields: dict[str, Any] = dict(INDEXER)
        if self.kind == DENSE:
            fields = {"experimental_attention_variant": None, **tiny.local_modules()}
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
            **fields,
        }


def _yarn() -> dict[str, Any]:
    """Return :data:`YARN` under Megatron's field names, one of which differs in older releases."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    values: dict[str, Any] = dict(YARN)
    values["rotary_scaling_factor"] = values.pop("factor")
    if "original_max_position_embeddings" not in MLATransformerConfig.__dataclass_fields__:
        values["max_position_embeddings"] = values.pop("original_max_position_embeddings")
    return values


_STACKED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")


def megatron_name(place: Place) -> str:
    """Return the name of a parameter, or of a router's bias, in Megatron's oldest release."""
    if not place.block:
        return place.name
    name = place.name.replace("experts.experts.", f"experts.local_experts.{place.expert}.")
    return f"{place.block}.layers.{place.layer}.{name}"


def rows_in(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the rows of transformers' stacked expert tensors that a name in its files refers to."""
    expert = _STACKED.fullmatch(name)
    if expert is None:
        return tensors[name]
    stack = "down_proj" if expert["part"] == "down" else "gate_up_proj"
    rows = tensors[f"{expert['experts']}.{stack}"][int(expert["number"])]
    return rows if stack == "down_proj" else rows.chunk(2)[expert["part"] == "up"]


def of_transformers(model: Model, folder: Path | None = None) -> dict[str, Any]:
    """Run transformers on the batch of :func:`step`, and backpropagate the mean loss over its tokens.

    Args:
        model: model to build; its weights depend on Megatron's parameter names.
        folder: folder for the model's files; None writes none.

    Returns:
        ``logits`` ``[samples, length, vocabulary]``, and ``gradients`` under Megatron's names. Indexers have
        none, as transformers does not backpropagate through them.
    """
    theirs = model.theirs()
    tensors = {name: tensor.detach() for name, tensor in theirs.named_parameters()}
    tensors |= {name: tensor for name, tensor in theirs.named_buffers() if name.endswith("correction_bias")}
    shape = model.shape()
    names = {megatron_name(place): shape.names(place) for place in shape.places()}
    filled = 0
    for name, parts in names.items():
        pieces = [rows_in(part, tensors) for part in parts]
        rows = [piece.size(0) for piece in pieces]
        weight = tiny.weight_of(name, [sum(rows), *pieces[0].shape[1:]])
        for piece, part in zip(pieces, weight.split(rows), strict=True):
            piece.copy_(part)
        filled += weight.numel()
    assert filled == sum(tensor.numel() for tensor in tensors.values()), (
        "only one of the models has some tensors"
    )
    if folder is not None:
        theirs.save_pretrained(folder)
    with job_of_any_release(1, 0):
        tokens = job.samples(SAMPLES)
    logits = theirs(tokens[:, :-1], use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    derived = {name: tensor.grad for name, tensor in theirs.named_parameters() if tensor.grad is not None}
    gradients = {}
    for name, parts in names.items():
        with contextlib.suppress(KeyError):  # indexers and router biases have no gradient
            gradients[name] = torch.cat([rows_in(part, derived) for part in parts])
    return {"logits": logits.detach(), "gradients": gradients}


def loss_of_transformers(folder: Path, batches: Path, samples: int) -> float:
    """Return transformers' mean fp32 loss over the tokens of a two-rank job's first step.

    Args:
        folder: model's folder.
        batches: folder written by ``recorded_pretrain.py``, with microbatches of one sample.
        samples: number of samples in a step, over all ranks.
    """
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ranks = [torch.load(path) for path in sorted(batches.glob("rank*.pt"))]
    if any(call["labels"] is None or call["tokens"] is None for calls in ranks for call in calls):
        stages = zip(*(calls[:samples] for calls in ranks), strict=True)
        first = [{"tokens": begin["tokens"], "labels": end["labels"]} for begin, end in stages]
    else:
        same = torch.equal(ranks[0][0]["tokens"], ranks[1][0]["tokens"])
        first = ranks[0][:samples] if same else [call for calls in ranks for call in calls[: samples // 2]]
    with torch.no_grad():
        losses = [
            F.cross_entropy(theirs(call["tokens"]).logits.flatten(0, 1), call["labels"].flatten())
            for call in first
        ]
    assert len(losses) == samples
    return float(sum(losses) / samples)


# -- functions that the ranks run -----------------------------------------------------------------


def step(model: Model, switches: Mapping[str, Any], folder: str = "", **layout: int) -> dict[str, Any]:
    """Run :func:`tiny.one_step` on the model.

    Args:
        model: model to build.
        switches: features to enable.
        folder: folder with the weights; if empty, weights depend on parameter names.
        layout: parallel sizes.

    Returns:
        Result of the step, with the names of router ``biases``. Ranks of the last stage add ``logits``
        ``[samples, local positions, local vocabulary]``, their ``positions`` and the ``first`` token.
    """
    build, gathered, kept = tiny.gpt_model, {"biases": list[str](), "logits": None}, list[Tensor]()

    def gpt_model(*args: Any) -> Any:
        chunk = build(*args)
        biases = _expert_biases(chunk)
        for name, bias in biases.items():
            bias.copy_(tiny.weight_of(name, bias.shape))
            gathered["biases"].append(name)
        if folder:
            poison(chunk, biases.values())
            loading.load([chunk], Path(folder), chunk.config, log.get())
        if chunk.post_process:
            chunk.output_layer.register_forward_hook(keep)
        return chunk

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> None:
        from megatron.core import parallel_state

        kept.append(output[0].detach().clone().transpose(0, 1))  # the loss overwrites the logits
        first = parallel_state.get_tensor_model_parallel_rank() * kept[0].size(-1)
        gathered.update(logits=torch.cat(kept), positions=job.own_positions(), first=first)

    with job_of_any_release(layout.get("cp", 1), 0), mock.patch.object(tiny, "gpt_model", gpt_model):
        sizes = {EXPERT_SIZES[name]: size for name, size in layout.items() if name in EXPERT_SIZES}
        fields = {**model.ours(), **communication(**layout), **sizes}
        microbatches = layout.get("pp", 1) if "vpp" in layout else 1
        sizes = {"num_microbatches": microbatches, "micro_batch_size": SAMPLES // microbatches}
        return tiny.one_step(dict(switches), fields, **sizes, **layout) | gathered


def read_files(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of transformers' files in a folder, under their names there."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def poison(chunk: torch.nn.Module, buffers: Iterable[Tensor] = ()) -> None:
    """Fill all weights of a model with NaN, so that a weight that is not loaded shows."""
    with torch.no_grad():
        for tensor in (*chunk.parameters(), *buffers):
            tensor.fill_(float("nan"))


def _expert_biases(chunk: torch.nn.Module) -> dict[str, Tensor]:
    """Return the routers' expert biases under their global names."""
    with mock.patch.object(type(chunk), "named_parameters", type(chunk).named_buffers):
        return {name: bias for name, bias in job.global_names(chunk).items() if name.endswith("expert_bias")}


def biases_in_bf16(model: Model, folder: str) -> dict[str, Tensor]:
    """Load a model in bf16 from its files, wrapped as in Megatron's loop; return the router biases.

    Args:
        model: model to build.
        folder: folder with the model's files.
    """
    with job_of_any_release(1, 0), torch.no_grad():
        job.start({"experimental_attention_variant": "dsa"})
        from megatron.core.transformer.module import Float16Module

        config = tiny.config(**model.ours(), bf16=True, params_dtype=torch.bfloat16)
        wrapped = Float16Module(config, tiny.gpt_model(config))
        loading.load([wrapped], Path(folder), config, log.get())
        return _expert_biases(wrapped.module)


def refusal(model: Model, switches: Mapping[str, Any], folder: str, **layout: int) -> str:
    """Load a model whose files are unusable; return the error message.

    Args:
        model: model to build.
        switches: features to enable.
        folder: folder with the model's files.
        layout: parallel sizes.
    """
    try:
        step(model, switches, folder, **layout)
    except RunError as error:
        return str(error)
    return "nothing is refused"
