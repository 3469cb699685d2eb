"""Backport of DSA outside attention: config fields, layer numbers, gradient averages and the loss log.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.backport.feature import Options
from mindspeed_dsa.features.dsa.indexer_loss import coefficient, indexer_loss
from mindspeed_dsa.megatron.dsa import SIZES
from mindspeed_dsa.megatron.indexer_loss import keep_step_loss

# -- fields of the configuration, under the names of later releases ----------------------------


@dataclasses.dataclass
class DSAFields:
    """DSA fields with the names, types and defaults of Megatron-core 0.16's ``TransformerConfig``."""

    experimental_attention_variant: str | None = None
    dsa_indexer_n_heads: int | None = None
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_loss_coeff: float | None = None
    dsa_indexer_use_sparse_loss: bool = False


FIELDS = SimpleNamespace(**{field.name: field for field in dataclasses.fields(DSAFields)})
"""``dataclasses.Field`` objects by name. Code that copies arguments to fields, replaces fields or derives a
dataclass finds them in the class's ``__dataclass_fields__``."""


def check_dsa_fields(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__`` to raise for DSA models that are not supported."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        problems = problems_of(self)
        if problems:
            raise ValueError("mindspeed_dsa: dsa-backport: " + "; ".join(problems))
        original(self, *args, **kwargs)

    return __post_init__


def problems_of(config: Any) -> list[str]:
    """Return problems with a DSA configuration, each with a fix."""
    variant = getattr(config, "experimental_attention_variant", None)
    if variant is None:
        return []
    if variant != "dsa":
        return [f"experimental_attention_variant={variant!r} is not known to this Megatron; use 'dsa'"]
    problems = [
        f"DSA needs {name}; DeepSeek-V3.2 has {usual}"
        for name, usual in SIZES.items()
        if not getattr(config, name)
    ]
    if not config.multi_latent_attention:
        problems.append("DSA is built on latent attention; use MLATransformerConfig")
    elif config.dsa_indexer_head_dim and config.dsa_indexer_head_dim < config.qk_pos_emb_head_dim:
        problems.append(
            f"dsa_indexer_head_dim={config.dsa_indexer_head_dim} has no room for the "
            f"qk_pos_emb_head_dim={config.qk_pos_emb_head_dim} in it; make it larger"
        )
    if config.apply_rope_fusion:
        problems.append("DSA has no fused RoPE here; use apply_rope_fusion=False")
    return problems


# -- layer numbers within the whole model, under which the indexer loss is logged ---------------
#
# These releases number attention layers within a pipeline stage or MTP module, if at all.


def number_in_model(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerLayer.__init__`` to set the attention's layer number, counted over all stages."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _number(self, self.layer_number)

    return __init__


def number_after_decoder(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionLayer.__init__`` to number MTP layers after the decoder layers."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _number(self.transformer_layer, self.config.num_layers + self.layer_number)

    return __init__


def _number(layer: Any, number: int) -> None:
    core_attention: Any = getattr(getattr(layer, "self_attention", None), "core_attention", None)
    if hasattr(core_attention, "indexer"):
        core_attention.layer_number = number


# -- average of replicated gradients over tensor parallel ranks --------------------------------


def average_marked_gradients(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``_allreduce_layernorm_grads`` to average marked gradients, as later releases do.

    The indexer's replicas start with equal weights, and their gradients are equal up to rounding. Without the
    average, nondeterministic kernels would make the replicas drift apart.
    """

    def _allreduce_layernorm_grads(model: list[Any], *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        group = context.megatron("core.parallel_state").get_tensor_model_parallel_group()
        if group.size() == 1:
            return
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if not getattr(parameter, "average_gradients_across_tp_domain", False):
                    continue
                gradient = getattr(parameter, "main_grad", parameter.grad)
                if gradient is None:  # not trained
                    continue
                # Megatron sums q_layernorm gradients, because of the name: only divide these.
                if "q_layernorm" not in name:
                    dist.all_reduce(gradient, group=group)
                gradient /= group.size()

    return _allreduce_layernorm_grads


# -- the indexer loss in Megatron-LM's log -----------------------------------------------------


def log_indexer_loss(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``megatron.training.training.training_log`` to log the indexer loss. Collective."""

    def training_log(*args: Any, **kwargs: Any) -> Any:
        job = context.megatron("training.global_vars")
        if coefficient(job.get_args()) > 0:
            # Parameter positions differ between releases, names do not.
            arguments = inspect.signature(original).bind(*args, **kwargs).arguments
            keep_step_loss(indexer_loss(context.megatron).tracker.track_indexer_metrics, context)(
                loss_scale=1 / context.megatron("core.num_microbatches_calculator").get_num_microbatches(),
                iteration=arguments["iteration"],
                writer=job.get_tensorboard_writer(),
                wandb_writer=job.get_wandb_writer(),
                total_loss_dict=arguments["total_loss_dict"],
            )
        return original(*args, **kwargs)

    return training_log
