"""``--moe-grouped-gemm`` without Transformer Engine."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.moe.grouped_experts.options import Options
from mindspeed_dsa.features.moe.grouped_experts.validation import check_arguments, wanted
from mindspeed_dsa.megatron.configuration import validate
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.moe.grouped_experts.provider"
_CHECKPOINT = "mindspeed_dsa.features.moe.grouped_experts.checkpoint"
_STATE = "mindspeed_dsa.features.moe.grouped_experts.optimizer_state"
_SAVE_BUFFERS = "save_buffers_of_single_experts"
_OPTIMIZERS = "megatron.core.optimizer"
_RANGE = ">=0.12.1,<0.21"

FEATURE = Feature(
    name="moe-grouped-gemm",
    summary="Stacks the experts' weights and multiplies all experts' rows by them in one operator.",
    flags=(
        Flag(
            "--moe-grouped-gemm",
            "Megatron's own flag; with --transformer-impl local the experts become one module.",
            megatron=True,
        ),
        Flag(
            "--gemm-weight-layout",
            "How each expert's matrix lies in memory: kn, [in, out]; nk, [out, in]; auto, the default: kn on "
            "NPUs, nk elsewhere. Checkpoints do not depend on it.",
            kind="value",
            choices=("auto", "kn", "nk"),
        ),
        Flag("--transformer-impl", "Megatron's own flag.", kind="value", type=str, megatron=True),
    ),
    patches=(
        Patch(
            "megatron.core.models.backends:LocalSpecProvider.grouped_mlp_modules",
            "wrap",
            f"{_IMPL}:provide_grouped_experts",
            "the local modules for grouped experts need another package and bf16, or are sequential",
            params=("moe_use_grouped_gemm",),
            versions=">=0.13,<0.21",
        ),
        Patch(
            "megatron.core.models.gpt.moe_module_specs:get_moe_module_spec",
            "wrap",
            f"{_IMPL}:specify_grouped_experts",
            "the local modules for grouped experts need another package and bf16",
            params=("use_te", "num_experts", "moe_grouped_gemm"),
            versions=">=0.12.1,<0.13",
        ),
        Patch(
            "megatron.training.arguments:validate_args",
            "wrap",
            f"{_IMPL}:validate_on_every_device",
            "it demands a GPU that some kernels for grouped experts need",
            params=("args",),
            required=False,
            priority=-1,
        ),
        *(
            Patch(
                f"{_OPTIMIZERS}.optimizer:ChainedOptimizer.{method}",
                "wrap",
                f"{_STATE}:{impl}",
                "the format torch knows parameters by their number, and single experts are more of them",
                params=params,
                versions=_RANGE,
            )
            for method, impl, params in (
                ("state_dict", "save_single_experts", ()),
                ("load_state_dict", "load_single_experts", ("state_dict",)),
            )
        ),
        *(
            Patch(
                f"{_OPTIMIZERS}.{target}",
                "wrap",
                f"{_STATE}:{impl}",
                "whole buffers have the weights of single experts in another order",
                params=params,
                versions=_RANGE,
            )
            for target, impl, params in (
                ("optimizer:ChainedOptimizer.save_parameter_state", _SAVE_BUFFERS, ()),
                ("distrib_optimizer:DistributedOptimizer.save_parameter_state", _SAVE_BUFFERS, ()),
                ("distrib_optimizer:DistributedOptimizer.sharded_param_state_dp_zero", _SAVE_BUFFERS, ()),
                (
                    "distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_zero",
                    "load_buffers_of_single_experts",
                    ("state_dict",),
                ),
            )
        ),
        *(
            Patch(
                f"{_OPTIMIZERS}.distrib_optimizer:DistributedOptimizer.{method}",
                "wrap",
                f"{_CHECKPOINT}:refuse_slices_of_buffers",
                "slices of buffers have another order with stacked experts, which nothing else would notice",
                versions=versions,
            )
            for method, versions in (
                ("sharded_param_state_fs_bucket_space", ">=0.12.1,<0.15"),
                ("sharded_param_state_dp_reshardable", ">=0.15,<0.21"),
            )
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    active=wanted,
    options=Options.of,
    validate=validate(check_arguments, Options.of),
    doc="moe-grouped-gemm.md",
)
