"""Converters for TorchTitan 0.3, which edit the model's configuration before the model is built.

:data:`CLASSES` are for ``model_registry(..., converters=[...])`` of a ``config_registry``. :func:`converters`
does the same from the command line, through ``--override.imports``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mindspeed_dsa.integrations.torchtitan.config_converters import (
    Experts,
    Norms,
    Permutation,
    Rotary,
    replace_configs,
)
from mindspeed_dsa.integrations.torchtitan.context import check, context_of
from mindspeed_dsa.integrations.torchtitan.latent_attention import (
    Attention,
    enter,
    local,
    own_random_numbers,
    sparse_output,
)
from mindspeed_dsa.integrations.torchtitan.names import (
    SparseOptions,
    check_device,
    not_plain,
    nothing_found,
    options_of,
    resolve,
    rows_of_a_step,
)
from torchtitan.config.override import derive
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.tools.utils import device_type

# -- sparse attention --------------------------------------------------------------------------

UNKNOWN = "unknown"
"""Load balancer of an attention that no configuration of a trainer has told of it."""


class Indexer(Module):
    """Indexer of a layer, with DeepSeek-V3.2's parameter names."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Configurations of the indexer's projections and of the key's norm."""

        wq_b: Linear.Config
        wk: Linear.Config
        k_norm: LayerNorm.Config
        weights_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wq_b = config.wq_b.build()
        self.wk = config.wk.build()
        self.k_norm = config.k_norm.build()
        self.weights_proj = config.weights_proj.build()

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialise the indexer with its own seed, so that the model's other weights do not change."""
        with own_random_numbers(self.wk.weight.device):
            super().init_states(buffer_device=buffer_device)


class InnerAttention(ScaledDotProductAttention):
    """Inner attention that never attends: :class:`SparseAttention` does.

    TorchTitan applies context parallelism by wrapping the inner attention's forward: it then gets DTensors on
    the mesh of context parallel ranks. No other object tells a layer of this mesh.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        """Configuration without options."""

    _mesh: Any = None

    @wraps(ScaledDotProductAttention.forward)  # TorchTitan reads the names of the arguments
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._mesh = query.device_mesh if isinstance(query, DTensor) else None
        return query

    def context_mesh(self, device: torch.device) -> Any:
        """Return the mesh of context parallel ranks, ``None`` without context parallelism."""
        # [batch, rows, heads, dim]
        states = torch.zeros(1, 1, 1, 1, device=device)
        self(states, states, states)
        return self._mesh


class SparseAttention(LatentAttention):
    """TorchTitan's latent attention, restricted to the keys that an indexer selects."""

    @dataclass(kw_only=True, slots=True)
    class Config(LatentAttention.Config):
        """Configuration of the replaced attention and of the indexer."""

        indexer: Indexer.Config
        options: SparseOptions
        documents: bool
        """Whether tokens see only their own document."""
        rows: int | None = None
        """Tokens of a step on all ranks; ``None`` if the indexer has no loss."""
        load_balancer: str | None = UNKNOWN
        """TorchTitan's ``context_parallel_load_balancer``."""

    indexer_loss: Tensor | None = None
    """Loss of the last training pass, a mean over this rank's tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # A converter that is listed later may have replaced it.
        if type(config.wkv_b) is not Linear.Config:
            raise not_plain("npu_dsa", "attention.wkv_b", config.wkv_b, Linear.Config)
        self.indexer = config.indexer.build()
        self.options, self.documents = config.options, config.documents
        if config.options.loss_coeff and config.rows is None:
            raise ValueError(
                "npu_dsa: the indexer's loss is a mean over the rows of a step, which no override is told: "
                'add "rows_per_step": the tokens of one optimizer step on all ranks, '
                'training.global_batch_size times training.seq_len; or "loss_coeff": 0 for an indexer that '
                "is not trained. Converters in model_registry(converters=[...]) need neither"
            )
        self._load_balancer = config.load_balancer
        # The tensor parallel group is set in parallelize().
        self._core = Attention(config.options, config.rows or 1)
        self._knows_context = False

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialise the attention as TorchTitan does, and enter it for compiled graphs."""
        super().init_states(buffer_device=buffer_device)
        enter(self)

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelise as TorchTitan does, and store the groups of tensor and context parallel ranks."""
        self._learn_context(parallel_dims.get_mesh("cp") if parallel_dims.cp_enabled else None)
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("tp")
        if mesh is not None:
            self._core = self._core._replace(tensor=mesh.get_group())

    def _learn_context(self, mesh: Any) -> None:
        """Store the context parallelism of the layer; ``mesh`` is ``None`` without it."""
        self._knows_context = True
        if mesh is None:
            return
        if self._load_balancer == UNKNOWN:
            raise ValueError(
                f"npu_dsa: context_parallel_degree {mesh.size()}: an override is not told how tokens are "
                "dealt to context parallel ranks; set the converters in Python, in "
                "model_registry(converters=[...])"
            )
        context = context_of(mesh.get_group(), self._load_balancer, self.options.context_parallel_algo)
        self._core = self._core._replace(context=context)

    def _check_length(self, rows: int, flat: bool) -> None:
        """Raise ``ValueError`` if tokens are split in a way that this class was not told of."""
        context, length = self._core.context, self.rope.config.max_seq_len
        ranks = 1 if context is None else context.ranks
        if (flat and ranks > 1) or (self.training and not flat and rows * ranks != length):
            raise ValueError(
                f"npu_dsa: a layer got {rows} tokens of sequences of {length}, on {ranks} context parallel "
                "ranks, so that other ranks have keys of which it was not told; use TorchTitan 0.3 and its "
                "own parallelize function of deepseek_v3"
            )

    def forward(self, x: Tensor, attention_masks: Any = None, positions: Tensor | None = None) -> Tensor:
        """Run sparse attention; arguments as in the base class. Masks are derived from ``positions``."""
        # parallelize() is called only with tensor or expert parallelism. Compiled layers have no context.
        if not self._knows_context and not torch.compiler.is_compiling():
            self._learn_context(self.inner_attention.context_mesh(x.device))
        flat = x.dim() == 2  # TorchTitan after 0.3 concatenates the tokens of a batch
        self._check_length(x.shape[0] if flat else x.shape[1], flat)
        latent, key_rope = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        key_rope = key_rope.unsqueeze(-2)

        def rotate(states: Tensor) -> Tensor:
            # The embedding rotates a pair, of which only the first is wanted; key_rope has one head.
            return self.rope(states, key_rope, positions)[0]  # type: ignore[no-any-return]

        at = local(positions) if self.documents and positions is not None else None
        return sparse_output(self, x, (latent, key_rope), rotate, at)


def sparse(
    attention: LatentAttention.Config, options: SparseOptions, rows: int | None
) -> SparseAttention.Config:
    """Return a configuration of sparse attention that keeps the projections of a dense attention.

    The indexer is initialised like the attention's first key projection, and is replicated on every tensor
    parallel rank. Each rank computes the indexer's full gradient, so it is not reduced over these ranks.
    """
    options.check(attention.qk_rope_head_dim)
    if type(attention.wkv_b) is not Linear.Config:
        raise not_plain("npu_dsa", "attention.wkv_b", attention.wkv_b, Linear.Config)

    def whole(*names: str) -> ShardingConfig:
        return ShardingConfig(state_shardings={name: dense_param_placement(tp=spmd.I) for name in names})

    def linear(inputs: int, outputs: int) -> Linear.Config:
        return Linear.Config(
            in_features=inputs,
            out_features=outputs,
            param_init=attention.wkv_a.param_init,
            sharding_config=whole("weight"),
        )

    inner = attention.inner_attention
    replacement: SparseAttention.Config = derive(
        attention,
        SparseAttention.Config,
        # The inner attention is never called. This class needs no masks, so the trainer makes none.
        inner_attention=InnerAttention.Config(),
        indexer=Indexer.Config(
            wq_b=linear(attention.q_lora_rank or attention.dim, options.index_heads * options.index_dim),
            wk=linear(attention.dim, options.index_dim),
            k_norm=LayerNorm.Config(
                normalized_shape=options.index_dim, eps=1e-6, sharding_config=whole("weight", "bias")
            ),
            weights_proj=linear(attention.dim, options.index_heads),
        ),
        options=options,
        documents=isinstance(inner, (FlexAttention.Config, VarlenAttention.Config)),
        rows=rows,
    )
    return replacement


# -- converters --------------------------------------------------------------------------------


class Sparse(ModelConfigConverter):
    """Converter ``npu_dsa``: replaces latent attention by sparse attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Converter configuration with the fields of ``SparseOptions``."""

        options: SparseOptions = field(default_factory=SparseOptions)

    def __init__(self, config: Config) -> None:
        self.options = config.options

    def convert(self, model_config: Any) -> Any:
        self.replace(model_config, None)
        return _told_of_the_step(model_config)

    def replace(self, model: Any, rows: int | None) -> None:
        """Replace every latent attention in a model's configuration by sparse attention.

        Args:
            model: model's configuration, changed in place.
            rows: number of tokens per step; ``None`` if it is set later.
        """
        check_device("npu_dsa", device_type)
        replaced = replace_configs(
            model, LatentAttention.Config, lambda _, each: sparse(each, self.options, rows)
        )
        if not replaced:
            raise nothing_found("npu_dsa", model, "latent attention (deepseek_v3's Attention)")


def _told_of_the_step(model: Any) -> Any:
    """Return the model configuration with a subclass that also sets sparse attention's tokens per step."""
    kind = type(model)

    @dataclass(kw_only=True, slots=True)
    class Config(kind):  # type: ignore[misc, valid-type]
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            kind.update_from_config(self, config=config, **kwargs)
            if hasattr(config, "training"):
                for _, attention, _, _ in self.traverse(SparseAttention.Config):
                    attention.rows = _rows_of(config)
                    if config.parallelism.context_parallel_degree > 1:
                        check(config, attention.options.context_parallel_algo, attention.documents)
                        attention.load_balancer = config.parallelism.context_parallel_load_balancer

    return derive(model, Config)


def _rows_of(config: Any) -> int:
    """Return the number of tokens per step on all ranks, computed from a trainer's configuration."""
    training, parallelism = config.training, config.parallelism
    world = int(os.environ.get("WORLD_SIZE", "1"))
    degrees = ("tensor", "pipeline", "context")
    # 64 ranks with tensor 4, pipeline 2 and context 1 leave 8 ranks with different data.
    ranks = world
    for degree in degrees:
        ranks //= getattr(parallelism, f"{degree}_parallel_degree")
    if hasattr(training, "num_tokens_per_train_step"):  # after 0.3
        if training.num_tokens_per_train_step > 0:
            return int(training.num_tokens_per_train_step)
        passes = parallelism.num_pp_microbatches if parallelism.pipeline_parallel_degree > 1 else 1
        return int(training.num_tokens_per_microbatch_per_dp_rank * passes * ranks)
    return rows_of_a_step(training.global_batch_size, training.local_batch_size, training.seq_len, ranks)


CLASSES: dict[str, Any] = {
    "dsa": Sparse,
    "rms_norm": Norms,
    "permute": Permutation,
    "grouped_matmul": Experts,
    "rope": Rotary,
}
"""Converter classes by device-neutral name."""


def build(names: Iterable[str], **options: Any) -> list[ModelConfigConverter.Config]:
    """Return converters for ``model_registry(..., converters=build(["npu_dsa", "npu_rms_norm"], topk=512))``.

    Args:
        names: names of converters, with or without ``npu_``.
        **options: options of sparse attention, see :class:`SparseOptions`.

    Raises:
        ValueError: a name or an option is unknown.
    """
    converters = resolve(names, what="converters")
    if options and "dsa" not in converters:
        raise ValueError(
            f"converters: {', '.join(options)} are options of npu_dsa, which is not among the names"
        )
    return [
        Sparse.Config(options=options_of(options)) if name == "dsa" else CLASSES[name].Config()
        for name in converters
    ]


def convert_in_place(model: Any, names: Iterable[str], rows_per_step: int | None, **options: Any) -> None:
    """Apply converters to a model's configuration that a trainer already holds.

    Args:
        model: model's configuration.
        names: names of converters, see :func:`build`.
        rows_per_step: tokens of an optimizer step on all ranks, for the indexer's loss.
        **options: options of sparse attention, see :func:`build`.
    """
    for converter in build(names, **options):
        built = converter.build()
        # An override does not get the trainer's configuration, so the tokens of a step are an argument.
        if isinstance(built, Sparse):
            built.replace(model, rows_per_step)
        else:
            built.convert(model)
