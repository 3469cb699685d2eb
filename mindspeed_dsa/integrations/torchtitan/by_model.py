"""Converters for TorchTitan 0.2, which replace layers of the built model while it is on the meta device.

``[experimental] custom_import = "mindspeed_dsa.integrations.torchtitan"`` registers the converters, and
``[model] converters`` lists those to apply. ``[job] custom_config_module =
"mindspeed_dsa.integrations.torchtitan.by_model"`` adds the section ``[dsa]`` with the options of sparse
attention, and the switch of the optimizer to ``[optimizer]``.

TorchTitan reads the types of fields from annotations, so annotations in this module must not be strings.
"""

from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_module

from mindspeed_dsa.integrations.torchtitan.context import check, context_of
from mindspeed_dsa.integrations.torchtitan.latent_attention import (
    Attention,
    enter,
    local,
    own_random_numbers,
    sparse_output,
)
from mindspeed_dsa.integrations.torchtitan.layers import (
    gather_back,
    multiply_up_to,
    normalise,
    rotate_heads,
    route,
)
from mindspeed_dsa.integrations.torchtitan.names import (
    CONVERTERS,
    SparseOptions,
    check_device,
    not_plain,
    nothing_found,
    options_of,
    resolve,
    rows_of_a_step,
)
from mindspeed_dsa.integrations.torchtitan.swapped_moments import DEFAULT_TIMES, NAME, swap_moments
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models import _supported_models
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.moe.moe import GroupedExperts, MoE
from torchtitan.models.utils import trunc_normal_
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.tools.utils import device_type


@dataclass
class SwapOptions:
    """Fields added to section ``[optimizer]``: moments on the host, and the number of parts of a step."""

    npu_swap_optimizer: bool = False
    npu_swap_optimizer_times: int = DEFAULT_TIMES


@dataclass
class JobConfig:
    """Fields added to TorchTitan's job configuration: section ``[dsa]``, the options of ``npu_dsa``."""

    dsa: SparseOptions = field(default_factory=SparseOptions)
    optimizer: SwapOptions = field(default_factory=SwapOptions)


# -- layers ------------------------------------------------------------------------------------


class Indexer(nn.Module):
    """Indexer of a layer, with DeepSeek-V3.2's parameter names."""

    def __init__(self, hidden: int, query_input: int, options: SparseOptions) -> None:
        super().__init__()
        self.wq_b = nn.Linear(query_input, options.index_heads * options.index_dim, bias=False)
        self.wk = nn.Linear(hidden, options.index_dim, bias=False)
        self.k_norm = nn.LayerNorm(options.index_dim, eps=1e-6)
        self.weights_proj = nn.Linear(hidden, options.index_heads, bias=False)

    def init_weights(self) -> None:
        """Initialise the indexer with its own seed, so that the model's other weights do not change."""
        with own_random_numbers(self.wk.weight.device):
            for layer in (self.wq_b, self.wk, self.weights_proj):
                trunc_normal_(layer.weight, mean=0.0, std=0.02)
        self.k_norm.reset_parameters()


class SparseAttention(deepseek_v3.Attention):
    """TorchTitan's latent attention, restricted to the keys that an indexer selects."""

    indexer: Indexer
    indexer_loss: Tensor | None = None
    """Loss of the last training pass, a mean over this rank's tokens."""
    _core: Attention
    turn = staticmethod(deepseek_v3.apply_rotary_emb)
    """Rotary embedding; ``npu_rope`` sets another one in the module."""

    def take(self, core: Attention, mesh: Any) -> None:
        """Add indexer and core attention to a dense attention whose ``__class__`` was set to this class.

        Args:
            core: layer's core attention.
            mesh: mesh of tensor parallel ranks, or ``None``.
        """
        like = self.wkv_a.weight
        with torch.device(like.device):
            self.indexer = Indexer(self.dim, self.q_lora_rank or self.dim, core.options).to(like.dtype)
        if mesh is not None:  # replicated on every rank
            distribute_module(self.indexer, mesh)
        # DDP waits for the gradient of each parameter that requires one.
        self.indexer.requires_grad_(core.options.loss_coeff > 0)
        self._core = core

    def init_weights(self, init_std: float) -> None:
        """Initialise the attention as TorchTitan does, and the indexer; enter it for compiled graphs."""
        super().init_weights(init_std)
        # A converter that is listed later may have replaced it.
        if type(self.wkv_b) is not nn.Linear:
            raise not_plain("npu_dsa", "attention.wkv_b", self.wkv_b, nn.Linear)
        self.indexer.init_weights()
        enter(self)

    def forward(
        self, x: Tensor, freqs_cis: Tensor, attention_masks: Any, positions: Tensor | None = None
    ) -> Tensor:
        """Run sparse attention; arguments as in the base class."""

        def rotate(states: Tensor) -> Tensor:
            return self.turn(states, freqs_cis, positions)  # type: ignore[no-any-return]

        latent, key_rope = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        return sparse_output(self, x, (latent, key_rope.unsqueeze(-2)), rotate, None)


def turn_pairs(heads: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> Tensor:
    """Rotate ``[batch, rows, heads, dim]`` with our operator; arguments as of TorchTitan's function."""
    pairs = heads.unflatten(-1, (-1, 2))[..., 0]
    turns = local(deepseek_v3.reshape_for_broadcast(freqs_cis, pairs, positions))
    cos, sin = (part.repeat_interleave(2, dim=-1) for part in (turns.real, turns.imag))
    return rotate_heads(heads, cos, sin, "pairs")


def with_turn(forward: Any) -> Any:
    """Return TorchTitan's forward function with :func:`turn_pairs` in place of its rotary embedding.

    Both are functions of one module, and nothing but its name refers to the embedding.
    """
    names = {**vars(deepseek_v3), "apply_rotary_emb": turn_pairs}
    del names["__name__"]  # by it, torch.compile would look names up in TorchTitan's module
    return FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)


class RotatedAttention(deepseek_v3.Attention):
    """TorchTitan's latent attention with our operator for the rotary embedding."""

    turn = staticmethod(turn_pairs)
    forward = with_turn(deepseek_v3.Attention.forward)


class FusedRMSNorm(nn.RMSNorm):
    """RMSNorm computed by our operator."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return normalise(x, self.weight, self.eps)


class GroupedMatmulExperts(GroupedExperts):
    """TorchTitan's experts, computed with our grouped matmul on every kind of device.

    With expert parallelism TorchTitan pads each expert's tokens for its own kernel. Rows after the last
    expert's tokens are zeros and stay zeros.
    """

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Apply each expert to its tokens ``[rows, dim]``, sorted by expert."""
        w1, w2, w3 = (local(weight).bfloat16().transpose(1, 2) for weight in (self.w1, self.w2, self.w3))
        # Counts [3, 0, 2] give ends [3, 3, 5]: one past each expert's last row.
        ends = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        rows = x.bfloat16()
        hidden = nn.functional.silu(multiply_up_to(rows, w1, ends)) * multiply_up_to(rows, w3, ends)
        return multiply_up_to(hidden, w2, ends).type_as(x)


class PermutingMoE(MoE):
    """TorchTitan's MoE layer, with our operator for token permutation."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply router and experts to ``[batch, rows, dim]``; returns the same shape."""
        tokens = x.reshape(-1, x.shape[-1])
        scores, expert_ids, counts = self.router(tokens, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        routed = route(tokens, expert_ids, scores, self.router.num_experts)
        rows = routed.rows
        if self.score_before_experts:
            rows = (rows.float() * routed.row_scores[:, None]).to(x.dtype)
        rows = self.experts(rows, counts)
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        out = gather_back(rows, routed, shared, weighted=not self.score_before_experts)
        return out.reshape(x.shape)


# -- converters --------------------------------------------------------------------------------


class Converter:
    """Base class of the converters below, each of which replaces one kind of layer."""

    name = ""
    wanted = ""

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        check_device(self.name, device_type)
        resolve((n for n in job_config.model.converters if _is_ours(n)), what="model.converters")
        self.job, self.ranks = job_config, parallel_dims

    def convert(self, model: nn.Module) -> None:
        """Replace the layers in place; raise ``ValueError`` if there are none."""
        if not sum(self.replaces(name, module) for name, module in [*model.named_modules()]):
            raise nothing_found(self.name, model, self.wanted)

    def replaces(self, name: str, module: nn.Module) -> bool:
        """Replace the module if this converter applies to it, and return whether it does."""
        raise NotImplementedError

    def post_optimizer_hook(self, model: Any) -> None:
        """Do nothing."""


class Sparse(Converter):
    """Converter ``npu_dsa``: replaces latent attention by sparse attention."""

    name, wanted = "npu_dsa", "latent attention (deepseek_v3's Attention)"

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        super().__init__(job_config, parallel_dims)
        section = getattr(job_config, "dsa", None)
        self.options = SparseOptions() if section is None else options_of(asdict(section))
        if parallel_dims.cp_enabled:
            check(job_config, self.options.context_parallel_algo, documents=False)

    def replaces(self, name: str, module: nn.Module) -> bool:
        if not isinstance(module, deepseek_v3.Attention):
            return False
        if module.attn_type != "sdpa":
            raise ValueError(
                f"npu_dsa: {name} has attn_type {module.attn_type!r}, whose mask says nothing that the "
                "operators could read; choose a flavor with 'sdpa', whose rows see all before them"
            )
        if type(module.wkv_b) is not nn.Linear:
            raise not_plain(self.name, f"{name}.wkv_b", module.wkv_b, nn.Linear)
        self.options.check(module.qk_rope_head_dim)
        training, dims = self.job.training, self.ranks
        rows = rows_of_a_step(
            training.global_batch_size,
            training.local_batch_size,
            training.seq_len,
            dims.dp_replicate * dims.dp_shard,
        )
        if dims.pp_enabled:
            rows = 1  # in pipelines TorchTitan sums the model's loss over the tokens of a step
        # The core needs only the group; the indexer is distributed over the mesh.
        mesh = dims.get_mesh("tp") if dims.tp_enabled else None
        tensor = None if mesh is None else mesh.get_group()
        context = None
        if dims.cp_enabled:
            balancer = self.job.parallelism.context_parallel_load_balancer
            algorithm = self.options.context_parallel_algo
            context = context_of(dims.get_mesh("cp").get_group(), balancer, algorithm)
        # Change the class in place: the module keeps its parameters and its name in the model.
        module.__class__ = SparseAttention
        module.take(Attention(self.options, rows, tensor, context), mesh)
        return True


class Norms(Converter):
    """Converter ``npu_rms_norm``: replaces RMSNorm by our operator."""

    name, wanted = "npu_rms_norm", "RMSNorm with a weight"

    def replaces(self, name: str, module: nn.Module) -> bool:
        if type(module) is not nn.RMSNorm or not module.elementwise_affine:
            return False
        module.__class__ = FusedRMSNorm
        return True


class Rotary(Converter):
    """Converter ``npu_rope``: rotates queries and keys of latent attention with our operator."""

    name, wanted = "npu_rope", "latent attention (deepseek_v3's Attention)"

    def replaces(self, name: str, module: nn.Module) -> bool:
        if not isinstance(module, deepseek_v3.Attention):
            return False
        if type(module) is deepseek_v3.Attention:
            module.__class__ = RotatedAttention
        module.turn = turn_pairs  # npu_dsa, before or after this converter, calls it
        return True


class Experts(Converter):
    """Converter ``npu_gmm``: computes experts with our grouped matmul."""

    name, wanted = "npu_gmm", "grouped experts (a mixture of experts)"

    def replaces(self, name: str, module: nn.Module) -> bool:
        if not isinstance(module, GroupedExperts):
            return False
        if type(module) is not GroupedExperts or type(module.w1) is not nn.Parameter:
            raise not_plain(self.name, name, module, GroupedExperts)
        module.__class__ = GroupedMatmulExperts
        return True


class Permutation(Converter):
    """Converter ``npu_permute``: permutes tokens of experts with our operator."""

    name, wanted = "npu_permute", "mixture of experts"

    def replaces(self, name: str, module: nn.Module) -> bool:
        if not isinstance(module, MoE):
            return False
        if type(module) is not MoE:
            raise ValueError(
                f"npu_permute: {name} is {type(module).__qualname__}, which permutes tokens in kernels of "
                "its own; choose expert_parallel_comm_backend = 'standard', or leave the converter out"
            )
        if self.ranks.tp_enabled and self.ranks.ep_enabled and not self.ranks.etp_enabled:
            raise ValueError(
                "npu_permute: with tensor parallelism and expert_tensor_parallel_degree 1 TorchTitan 0.2 "
                "spreads tokens over ranks where it permutes them; give experts the tensor parallel degree, "
                "use TorchTitan 0.3, or leave the converter out"
            )
        module.__class__ = PermutingMoE
        return True


CLASSES: dict[str, type[Converter]] = {
    "dsa": Sparse,
    "rms_norm": Norms,
    "permute": Permutation,
    "grouped_matmul": Experts,
    "rope": Rotary,
}
"""Converter classes by device-neutral name."""


def _is_ours(name: str) -> bool:
    return name in CONVERTERS or name in CLASSES


class SwappingSpec:
    """Train spec of a model that builds optimizers with moments on the host if the job switches this on.

    TorchTitan's own spec is read only when it is used, because this imports the model.

    Args:
        name: name of the model.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        own = import_module(f"torchtitan.models.{self._name}").get_train_spec()
        value = getattr(own, attribute)
        return partial(build_swapped, value) if attribute == "build_optimizers_fn" else value


def build_swapped(build: Any, model_parts: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Build a model's optimizers, and move their moments to the host if ``npu_swap_optimizer`` is set.

    Args:
        build: model's own function that builds the optimizers.
        model_parts: model's parts on this rank.
        config: section ``[optimizer]`` of the job.
        *args: further arguments of ``build``.
        **kwargs: the same.
    """
    optimizers = build(model_parts, config, *args, **kwargs)
    if getattr(config, "npu_swap_optimizer", False):
        if type(optimizers) is not OptimizersContainer:
            raise ValueError(
                f"{NAME}: {type(optimizers).__qualname__} steps or saves in its own way; leave out "
                f"optimizer.early_step_in_backward and fault tolerance, or {NAME}"
            )
        swap_moments(optimizers, config.npu_swap_optimizer_times)
    return optimizers


def register() -> None:
    """Register every converter under its name with and without ``npu_``, and the models' optimizers.

    Call once per process.
    """
    for npu, neutral in CONVERTERS.items():
        for name in (npu, neutral):
            register_model_converter(CLASSES[neutral], name)
    for model in _supported_models:
        try:
            register_train_spec(model, SwappingSpec(model))
        except ValueError:  # the program has registered a spec of its own
            own = get_train_spec(model)
            own.build_optimizers_fn = partial(build_swapped, own.build_optimizers_fn)
