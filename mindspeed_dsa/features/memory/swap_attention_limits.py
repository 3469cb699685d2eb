"""What swapping is asked to do, what it cannot be combined with, and the host memory it needs at least."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed_dsa.features.memory.recompute_limits import argument, of_choice, of_options, own_settings
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.platforms.host_pool import local_processes, require_host_memory

MODULES = {
    "input_norm": "input_layernorm",
    "self_attention": "self_attention",
    "post_attention_norm": "pre_mlp_layernorm",
}
"""Names for ``--swap-modules``, and what they are called in Megatron's layers."""
DEFAULT_MODULES = "self_attention"
DEFAULT_MIN_BYTES = 1 << 20

SWITCHES = ("swap_attention", "swap_modules", "swap_attention_min_bytes")
"""The switch, and its options beside the number of layers."""
_DEST = SWITCHES[0]


def modules() -> tuple[str, ...]:
    """Attributes of a layer whose modules swap."""
    return tuple(MODULES[name] for name in _names(own_settings().swap_modules or DEFAULT_MODULES))


def min_bytes() -> int:
    """Smaller storages stay on the device."""
    smallest: int | None = own_settings().swap_attention_min_bytes
    return DEFAULT_MIN_BYTES if smallest is None else smallest


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def problems(args: Any) -> Sequence[str]:
    """Problems of ``--swap-attention``; ``args`` is a namespace or Megatron's config."""
    return [
        *of_choice(args, _DEST),
        *of_options(args, *SWITCHES),
        *_of_values(args),
        *_of_other_movers(args),
        *_of_host_memory(args),
    ]


def _of_values(args: Any) -> Iterator[str]:
    settings = own_settings() or args
    text = argument(settings, "swap_modules") or DEFAULT_MODULES
    unknown = [name for name in _names(text) if name not in MODULES]
    if unknown:
        yield (
            f"--swap-modules {text}: {', '.join(map(repr, unknown))} cannot be swapped; use names out of "
            f"{', '.join(MODULES)}, with commas between them"
        )
    smallest = argument(settings, "swap_attention_min_bytes")
    if smallest is not None and smallest < 0:
        yield f"--swap-attention-min-bytes {smallest}: use a number of bytes, at least 0"


def _of_other_movers(args: Any) -> Iterator[str]:
    if argument(args, "recompute_granularity") == "full" and argument(args, "recompute_method") != "block":
        yield (
            "--swap-attention has nothing left to swap where --recompute-granularity full recomputes every "
            "layer; drop one of them, recompute the MLP alone (--recompute-granularity selective "
            "--recompute-modules mlp, moe for experts), or only some layers in full with --recompute-method "
            "block"
        )
    for name, flag in (
        ("cpu_offloading", "--cpu-offloading-num-layers"),
        ("fine_grained_activation_offloading", "--fine-grained-activation-offloading"),
    ):
        if argument(args, name):
            yield (
                f"--swap-attention and {flag} both take saved tensors from autograd, which lets only the "
                "innermost of them have a tensor; drop one of them"
            )
    graphs = argument(args, "cuda_graph_impl") or "none"
    if graphs != "none" or argument(args, "enable_cuda_graph") or argument(args, "external_cuda_graph"):
        yield (
            "--swap-attention cannot be used with CUDA graphs: what a graph saves for backward lies in the "
            "graph's own memory and passes no hook; drop --cuda-graph-impl or this"
        )
    if argument(args, "overlap_moe_expert_parallel_comm"):
        yield (
            "--swap-attention follows the layer's forward, which --overlap-moe-expert-parallel-comm takes "
            "apart; drop one of them"
        )
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if argument(args, name):
            yield (
                f"--swap-attention cannot be used with --{name.replace('_', '-')}: weights that are gathered "
                "inside a module would be taken for activations; use --use-distributed-optimizer instead"
            )


def _of_host_memory(args: Any) -> Iterator[str]:
    nbytes = least_host_bytes(args)
    if nbytes is None:
        return
    try:
        require_host_memory(
            nbytes,
            "--swap-attention on the first pipeline stage",
            "swap fewer layers (--swap-attention-num-layers N) or use smaller microbatches",
            _on_first_stage(args),
        )
    except SettingsError as error:
        yield str(error)


def _on_first_stage(args: Any) -> int:
    """Processes of this host that are on a first pipeline stage; ranks of a stage follow each other."""
    local = local_processes()
    world = int(os.environ.get("WORLD_SIZE", local))
    return min(local, max(world // (argument(args, "pipeline_model_parallel_size") or 1), 1))


def least_host_bytes(args: Any) -> int | None:
    """Bytes that the first pipeline stage certainly moves; none where the arguments do not tell.

    That stage has as many microbatches under way as there are stages, or as the batch has. Of each layer and
    microbatch at least these go to the host: the query and the output of the core attention, and key and
    value of multi-head attention. Other figures are known when tensors are there; the pool tells if they do
    not fit.
    """
    settings = own_settings() or args
    names = ("seq_length", "micro_batch_size", "num_layers", "num_attention_heads", "hidden_size")
    sizes = [argument(args, name) for name in names]
    if None in sizes or "self_attention" not in _names(argument(settings, "swap_modules") or DEFAULT_MODULES):
        return None
    length, batch, layers, heads, hidden = sizes
    stages = argument(args, "pipeline_model_parallel_size") or 1
    ranks = (argument(args, "tensor_model_parallel_size") or 1) * (
        argument(args, "context_parallel_size") or 1
    )
    if argument(args, "multi_latent_attention"):
        recomputed = "mla_up_proj" in (argument(args, "recompute_modules") or ())
        query = (
            0
            if recomputed
            else (argument(args, "qk_head_dim") or 0) + (argument(args, "qk_pos_emb_head_dim") or 0)
        )
        width = heads * (query + (argument(args, "v_head_dim") or 0))
    else:
        head = argument(args, "kv_channels") or hidden // heads
        groups = (
            argument(args, "num_query_groups") if argument(args, "group_query_attention") else None
        ) or heads
        width = 2 * head * (heads + groups)
    of_layer = length * batch * width * _bytes_of_number(args) // ranks
    smallest = argument(settings, "swap_attention_min_bytes")
    if of_layer < (DEFAULT_MIN_BYTES if smallest is None else smallest):
        return None
    wanted = argument(settings, "swap_attention_num_layers")
    of_stage = layers // stages if wanted is None else min(wanted, layers // stages)
    least: int = of_layer * of_stage * min(stages, _microbatches(args))
    return least


def _bytes_of_number(args: Any) -> int:
    return 2 if argument(args, "bf16") or argument(args, "fp16") else 4


def _microbatches(args: Any) -> int:
    whole, data_ranks = argument(args, "global_batch_size"), argument(args, "data_parallel_size")
    if whole is None or data_ranks is None:
        return 1
    of_rank: int = whole // (argument(args, "micro_batch_size") * data_ranks)
    return max(of_rank, 1)
