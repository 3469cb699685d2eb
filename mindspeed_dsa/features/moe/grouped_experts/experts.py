"""Experts module: Megatron's ``SequentialMLP`` with stacked expert weights and grouped matmuls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.experts import WeightSlice
from mindspeed_dsa.features.moe.grouped_experts import checkpoint
from mindspeed_dsa.features.moe.grouped_experts.feature import Options, check_model, recomputes_activation
from mindspeed_dsa.features.moe.grouped_experts.linear import GroupedLinear, Stack
from mindspeed_dsa.megatron.attribute_override import AttributeOverride, activation_of
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.megatron.gathered_weights import wait_for_weights
from mindspeed_dsa.ops.grouped_matmul import Groups

# -- choice of the experts module in Megatron's specs -----------------------------------------------
# Nothing of Megatron may be imported here: these functions are loaded while Megatron is being imported.


def provide_grouped_experts(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``LocalSpecProvider.grouped_mlp_modules``: return the grouped experts' class."""

    def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: bool, *args: Any, **kwargs: Any) -> Any:
        if not moe_use_grouped_gemm:
            return original(self, moe_use_grouped_gemm, *args, **kwargs)
        sequential = original(self, False, *args, **kwargs)
        # Depending on the release, a partial of the class, or the class and its submodules.
        if isinstance(sequential, partial):
            return partial(grouped_experts(context), *sequential.args, **sequential.keywords)
        _, submodules = sequential
        return grouped_experts(context), submodules

    return grouped_mlp_modules


def specify_grouped_experts(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``get_moe_module_spec`` of releases without spec providers: use the grouped experts' class."""

    def get_moe_module_spec(
        use_te: bool | None = True,
        num_experts: int | None = None,
        moe_grouped_gemm: bool | None = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if use_te or not moe_grouped_gemm:
            return original(use_te, num_experts, moe_grouped_gemm, *args, **kwargs)
        spec = original(use_te, num_experts, False, *args, **kwargs)
        spec.submodules.experts.module = grouped_experts(context)
        return spec

    return get_moe_module_spec


def validate_on_every_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``validate_args``: skip its check for a GPU, which only Megatron's own grouped kernels need."""

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        if not getattr(args, "moe_grouped_gemm", False) or args.transformer_impl != "local":
            return original(args, *rest, **kwargs)
        # Hidden from the check, and restored below.
        args.moe_grouped_gemm = False
        try:
            return original(args, *rest, **kwargs)
        finally:
            args.moe_grouped_gemm = True

    return validate_args


# -- the module ------------------------------------------------------------------------------------

LINEARS = ("linear_fc1", "linear_fc2")


@cache
def grouped_experts(context: Context[Options]) -> type:
    """Return the class of grouped experts, a subclass of this Megatron's ``SequentialMLP``."""
    base: Any = context.megatron("core.transformer.moe.experts").SequentialMLP

    class GroupedExperts(base):
        """All local experts as one MLP with grouped matmuls: each expert's rows use its own matrix.

        Megatron builds the experts one by one, so initial weights are unchanged; then their weights are
        stacked. ``MLP.forward`` and ``SequentialMLP.forward`` run as if there were one expert, so patches of
        other features still apply. The parameters are ``mlp.linear_fc1.weight`` and
        ``mlp.linear_fc2.weight``. State dicts and checkpoints have the keys and shapes of ``SequentialMLP``.

        The constructor has the arguments of ``SequentialMLP``.
        """

        def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
            require(context, check_model, config)
            super().__init__(num_local_experts, config, *args, **kwargs)
            experts = self.local_experts
            del self.local_experts
            self.mlp = experts[0]
            # Template for checkpoints: an unmodified expert without weights. Stored in __dict__, it is not a
            # child module and stays out of state dicts.
            self.__dict__["_plain_expert"] = _shallow(self.mlp)
            stack = Stack(context.options.layout, experts=object())
            for name in LINEARS:
                linears = [getattr(expert, name) for expert in experts]
                setattr(self.mlp, name, GroupedLinear(linears, stack, context.megatron))
            checkpoint.translate_names(self)
            self._recomputes = recomputes_activation(self.config)

        def forward(
            self,
            permuted_local_hidden_states: Tensor,
            tokens_per_expert: Tensor,
            permuted_probs: Tensor,
        ) -> Any:
            """Run the experts on rows ``[rows, hidden]`` sorted by expert; return ``[rows, hidden]``."""
            linears = [getattr(self.mlp, name) for name in LINEARS]
            groups = Groups(tokens_per_expert)
            mlp = self._recomputing_mlp if self._recomputes and torch.is_grad_enabled() else self.mlp
            # SequentialMLP.forward passes all rows to a single expert without splitting them.
            as_one = AttributeOverride(self, num_local_experts=1, local_experts=[mlp])
            for linear in linears:
                linear.groups = groups
            try:
                return base.forward(as_one, permuted_local_hidden_states, tokens_per_expert, permuted_probs)
            finally:
                for linear in linears:
                    linear.groups = None

        def reads_counts(self) -> bool:
            """Return whether the host reads ``tokens_per_expert``. If not, it can stay on the device."""
            return any(getattr(self.mlp, name).reads_sizes() for name in LINEARS)

        def expert_weights(self, expert: int) -> tuple[WeightSlice, ...]:
            """Return the expert's slices of the stacks, in the stacks' layout; see ``SingleExperts``."""
            return tuple(WeightSlice(getattr(self.mlp, name).weight, expert) for name in LINEARS)

        def run_expert(self, weights: Sequence[Tensor], rows: Tensor, probs: Tensor) -> Tensor:
            """Run one expert as a stack of size 1."""
            linears = [getattr(self.mlp, name) for name in LINEARS]
            # [1, in, out] or [1, out, in]
            stacks = {f"{name}.weight": weight[None] for name, weight in zip(LINEARS, weights, strict=True)}
            for linear in linears:
                linear.groups = Groups([rows.size(0)])
            try:
                output: Tensor = torch.func.functional_call(self.mlp, stacks, (rows, probs))[0]
            finally:
                for linear in linears:
                    linear.groups = None
            return output

        def wait_for_weights(self) -> None:
            """Wait until the overlapped parameter all-gather has delivered the stacks."""
            for name in LINEARS:
                wait_for_weights(getattr(self.mlp, name))

        def _recomputing_mlp(self, rows: Tensor, probs: Tensor) -> Any:
            """Run the MLP with ``moe_act`` recomputation: fc2's backward recomputes the activation."""
            mlp = self.mlp
            intermediate, bias = mlp.linear_fc1(rows)
            recomputed = context.megatron("core.tensor_parallel").CheckpointWithoutOutput()
            activation = recomputed.checkpoint(
                activation_of(type(mlp).forward, mlp, bias, {}), intermediate, probs
            )
            output, bias = mlp.linear_fc2(activation)
            recomputed.discard_output_and_register_recompute(output)
            return output, bias

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            """Return the sharded state dict with the keys, shapes and offsets of ``SequentialMLP``."""
            # vars(self): attributes set by other features on this module apply to its experts too.
            apart = AttributeOverride(self, **{**vars(self), "local_experts": self._experts_apart()})
            state: dict[str, Any] = base.sharded_state_dict(apart, prefix, sharded_offsets, metadata)
            for name in LINEARS:
                linear = getattr(self.mlp, name)
                shards = [state.pop(key) for key in checkpoint.expert_keys(self, prefix, name)]
                here = [shards[position] for position in linear.matrices()]
                state[f"{prefix}mlp.{name}.weight"] = checkpoint.sharded_stack(linear, here, context.megatron)
            return state

        def _experts_apart(self) -> list[Any]:
            """Return the local experts as separate modules, with weights that are views of the stacks."""
            # Sharded state dicts need every local expert. Those stored entirely on another rank get weights
            # on the meta device, and their shards are dropped.
            experts = []
            matrices = {name: getattr(self.mlp, name).matrices() for name in LINEARS}
            for position in range(self.num_local_experts):
                expert = _shallow(self._plain_expert)
                for name, here in matrices.items():
                    weight = here.get(position)
                    if weight is None:
                        weight = next(iter(here.values())).to("meta")
                    expert._modules[name] = _shallow(expert._modules[name])
                    expert._modules[name].weight = Parameter(weight, requires_grad=False)
                experts.append(expert)
            return experts

        def tensors_of(self, position: int) -> list[Tensor]:
            """Return views ``[out, in]`` of one local expert's weights, for features that place experts."""
            linears = (getattr(self.mlp, name) for name in LINEARS)
            return [linear.by_expert(linear.weight.detach())[position] for linear in linears]

        def backward_dw(self) -> None:
            """Do nothing, because weight gradients are computed in backward."""

    return GroupedExperts


def _shallow(module: Any) -> Any:
    """Copy a module so that replacing the copy's children or parameters does not change the original."""
    copied = copy.copy(module)
    for name in ("_modules", "_parameters"):
        vars(copied)[name] = dict(vars(module)[name])
    return copied
