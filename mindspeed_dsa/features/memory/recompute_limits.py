"""What recomputing outputs cannot be combined with, told from arguments or from a built configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_ACTIVATION = "recompute_activation_function"
_NORM = "recompute_norm"


def of_activation(args: Any) -> Sequence[str]:
    """Problems of ``--recompute-activation-function``; ``args`` is a namespace or Megatron's config."""
    return [
        *of_choice(args, _ACTIVATION),
        *_of_both(args, "--recompute-activation-function"),
        *_of_own_module(args, "--recompute-activation-function", "moe_act"),
        *_of_fused_mlp(args),
    ]


def of_norm(args: Any) -> Sequence[str]:
    """Problems of ``--recompute-norm``."""
    return [
        *of_choice(args, _NORM),
        *_of_both(args, "--recompute-norm"),
        *_of_own_module(args, "--recompute-norm", "layernorm"),
    ]


def of_outputs(args: Any) -> Sequence[str]:
    """Problems of ``--recompute-verify`` where it is used with Megatron's own modules alone."""
    return list(_of_precision_and_graphs(args, "--recompute-verify"))


def layers_wanted(dest: str) -> int | None:
    """The number of layers that somebody has asked for; none for all of them."""
    wanted: int | None = getattr(own_settings(), f"{dest}_num_layers", None)
    return wanted


def own_settings() -> Any:
    """Our switches: not every job's own arguments hold what came from the environment or the API."""
    from mindspeed_dsa import session

    running = session.current()
    return running.settings if running else None


def of_choice(args: Any, dest: str) -> Iterator[str]:
    """Problems of a number of layers, for the switch that is called ``dest``."""
    settings = own_settings() or args
    flag = "--" + dest.replace("_", "-")
    wanted = getattr(settings, f"{dest}_num_layers", None)
    if wanted is None:
        return
    if not getattr(settings, dest, False):
        yield f"{flag}-num-layers {wanted} has no effect without {flag}; add that or drop it"
    total = getattr(args, "num_layers", None)
    if wanted < 0 or (total is not None and wanted > total):
        most = "" if total is None else f" and at most {total}, the number of layers"
        yield f"{flag}-num-layers {wanted}: use a number that is at least 0{most}"


def of_options(args: Any, dest: str, *options: str) -> Iterator[str]:
    """Problems of options that somebody has set without the switch that is called ``dest``."""
    settings = own_settings() or args
    if not getattr(settings, dest, False):
        for option in options:
            if getattr(settings, option, None) is not None:
                flag, switch = (f"--{name.replace('_', '-')}" for name in (option, dest))
                yield f"{flag} has no effect without {switch}; add that or drop it"


def _of_both(args: Any, flag: str) -> Iterator[str]:
    yield from _of_precision_and_graphs(args, flag)
    if argument(args, "recompute_granularity") == "full" and argument(args, "recompute_method") != "block":
        yield (
            f"{flag} has nothing left to do where --recompute-granularity full recomputes every layer; drop "
            "one of them, or recompute only some layers in full with --recompute-method block"
        )
    if argument(args, "cpu_offloading"):
        yield (
            f"{flag} frees the memory of tensors that --cpu-offloading-num-layers moves to the host, where "
            "nothing is gained by it; drop one of them"
        )
    if argument(args, "overlap_moe_expert_parallel_comm"):
        yield (
            f"{flag} has its hooks in the layer's forward, which --overlap-moe-expert-parallel-comm takes "
            "apart; drop one of them"
        )


def _of_precision_and_graphs(args: Any, flag: str) -> Iterator[str]:
    for name in ("fp8", "fp4"):
        if argument(args, name):
            yield (
                f"{flag} cannot be used with --{name}-format: the consumer keeps a quantised copy, "
                "so nothing would be freed, and recomputing would change scaling factors a second time; drop "
                "one of them"
            )
    graphs = argument(args, "cuda_graph_impl") or "none"
    if graphs != "none" or argument(args, "enable_cuda_graph") or argument(args, "external_cuda_graph"):
        yield (
            f"{flag} cannot be used with CUDA graphs: a graph holds the addresses of the memory that this "
            "frees; drop --cuda-graph-impl or this"
        )


def _of_own_module(args: Any, flag: str, module: str) -> Iterator[str]:
    if argument(args, "recompute_granularity") == "selective" and module in (
        argument(args, "recompute_modules") or ()
    ):
        yield (
            f"{flag} and --recompute-modules {module} do the same work, the latter in every layer; drop "
            f"{module} from the modules"
        )


def _of_fused_mlp(args: Any) -> Iterator[str]:
    if argument(args, "use_transformer_engine_op_fuser"):
        yield (
            "--recompute-activation-function: with --use-transformer-engine-op-fuser the activation is "
            "inside one operation with both linear layers and has no output of its own; drop one of them"
        )


def argument(args: Any, name: str) -> Any:
    """Of a namespace or of Megatron's config; none where it has no such argument."""
    return getattr(args, name, None)
