"""Converters for TorchTitan 0.3 of norms, rotary embeddings, experts, dispatchers and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.integrations.torchtitan.config_layers import (
    FusedRMSNorm,
    GroupedMatmulExperts,
    HalvesRotary,
    PairsRotary,
    PermutingDispatcher,
    PermutingExchange,
)
from mindspeed_dsa.integrations.torchtitan.names import check_device, not_plain, nothing_found
from mindspeed_dsa.integrations.torchtitan.swapped_moments import (
    DEFAULT_TIMES,
    NAME,
    check_times,
    swap_moments,
)
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import derive
from torchtitan.models.common import RMSNorm
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.tools.utils import device_type


def replace_configs(model: Any, kind: type, replacement: Callable[[str, Any], Any | None]) -> int:
    """Replace all configurations of class ``kind`` in the model, and return the number of replacements.

    Args:
        model: model's configuration.
        kind: configuration class to replace, including its subclasses.
        replacement: function of a configuration's name and the configuration; returns the new one, or
            ``None`` to keep it.
    """
    replaced = 0
    # A list, because the tree changes during the traversal.
    for name, config, parent, attribute in [*model.traverse(kind)]:
        new = replacement(name, config)
        if new is None:
            continue
        if isinstance(parent, list):
            parent[attribute] = new
        else:
            setattr(parent, attribute, new)
        replaced += 1
    return replaced


class Norms(ModelConfigConverter):
    """Converter ``npu_rms_norm``: replaces RMSNorm by our operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Configuration without options."""

    def __init__(self, config: Config) -> None:
        pass

    def convert(self, model_config: Any) -> Any:
        check_device("npu_rms_norm", device_type)

        def fused(name: str, norm: RMSNorm.Config) -> Any:
            # Derived norms compute something else, or, frozen by LoRA, are built in another way.
            plain = type(norm) is RMSNorm.Config and norm.elementwise_affine
            return derive(norm, FusedRMSNorm.Config) if plain else None

        if not replace_configs(model_config, RMSNorm.Config, fused):
            raise nothing_found("npu_rms_norm", model_config, "plain RMSNorm with a weight")
        return model_config


class Rotary(ModelConfigConverter):
    """Converter ``npu_rope``: rotates queries and keys with our operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Configuration without options."""

    def __init__(self, config: Config) -> None:
        pass

    def convert(self, model_config: Any) -> Any:
        check_device("npu_rope", device_type)
        replacements = {ComplexRoPE.Config: PairsRotary.Config, CosSinRoPE.Config: HalvesRotary.Config}

        def rotary(name: str, rope: RoPE.Config) -> Any:
            if type(rope) not in replacements:
                raise not_plain("npu_rope", name, rope, ComplexRoPE.Config)
            return derive(rope, replacements[type(rope)])

        if not replace_configs(model_config, RoPE.Config, rotary):
            raise nothing_found("npu_rope", model_config, "rotary embedding")
        return model_config


class Experts(ModelConfigConverter):
    """Converter ``npu_gmm``: computes experts with our grouped matmul."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Configuration without options."""

    def __init__(self, config: Config) -> None:
        pass

    def convert(self, model_config: Any) -> Any:
        check_device("npu_gmm", device_type)

        def multiplied(name: str, experts: GroupedExperts.Config) -> Any:
            if type(experts) is not GroupedExperts.Config:
                raise not_plain("npu_gmm", name, experts, GroupedExperts.Config)
            return derive(experts, GroupedMatmulExperts.Config)

        if not replace_configs(model_config, GroupedExperts.Config, multiplied):
            raise nothing_found("npu_gmm", model_config, "grouped experts (a mixture of experts)")
        return model_config


class Permutation(ModelConfigConverter):
    """Converter ``npu_permute``: permutes tokens of experts with our operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Configuration without options."""

    def __init__(self, config: Config) -> None:
        pass

    def convert(self, model_config: Any) -> Any:
        check_device("npu_permute", device_type)
        replacements = {
            LocalTokenDispatcher.Config: PermutingDispatcher.Config,
            AllToAllTokenDispatcher.Config: PermutingExchange.Config,
        }

        def permuting(name: str, dispatcher: Any) -> Any:
            if type(dispatcher) not in replacements:
                raise ValueError(
                    f"npu_permute: {name} is {type(dispatcher).__qualname__}, which permutes tokens in "
                    "kernels of its own; choose moe_comm_backend='standard', or leave the converter out"
                )
            return derive(dispatcher, replacements[type(dispatcher)])

        if not replace_configs(model_config, LocalTokenDispatcher.Config, permuting):
            raise nothing_found("npu_permute", model_config, "token dispatcher (a mixture of experts)")
        return model_config


# -- optimizers --------------------------------------------------------------------------------


class SwappedOptimizers(OptimizersContainer):
    """TorchTitan's optimizers, with Adam's moments on the host."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Configuration of TorchTitan's optimizers, and the number of parts of a step."""

        times: int = DEFAULT_TIMES

    def __init__(self, config: Config, *, model_parts: list[Any]) -> None:
        super().__init__(config, model_parts=model_parts)
        self.swapped = swap_moments(self.optimizers, config.times)


def swapped_optimizers(optimizer: Any, times: int) -> SwappedOptimizers.Config:
    """Return a configuration of the same optimizers with Adam's moments on the host.

    Args:
        optimizer: TorchTitan's own configuration of optimizers.
        times: number of parts of a step, see :class:`.SwappedMoments`.

    Raises:
        ValueError: the configuration is of another class, or has moments in bf16.
    """
    check_times(times)
    if type(optimizer) is not OptimizersContainer.Config:
        raise ValueError(
            f"{NAME}: the optimizer's configuration is {type(optimizer).__qualname__}, which builds "
            f"optimizers in its own way; use OptimizersContainer.Config, or leave out {NAME}"
        )
    if optimizer.implementation == "fused_opt_states_bf16":
        raise ValueError(
            f"{NAME}: implementation 'fused_opt_states_bf16' has moments in bf16, and {NAME} has fp32; use "
            f"'fused', or leave out {NAME}"
        )
    swapped: SwappedOptimizers.Config = derive(optimizer, SwappedOptimizers.Config, times=times)
    return swapped
