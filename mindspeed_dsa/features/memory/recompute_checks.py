"""What does not combine with outputs that are freed and computed again, in arguments or configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.memory.weight_shards import check_weight_shards
from mindspeed_dsa.megatron.configuration import argument


def check_recompute(args: Any, flag: str) -> Iterator[str]:
    """What rules out recomputing outputs inside a layer."""
    yield from check_precision_and_graphs(args, flag)
    yield from check_weight_shards(args, flag)
    if argument(args, "recompute_granularity") == "full" and argument(args, "recompute_method") != "block":
        yield (
            f"{flag} has nothing left to do where --recompute-granularity full recomputes every layer; drop "
            "one of them, or recompute only some layers in full with --recompute-method block"
        )
    if argument(args, "cpu_offloading"):
        yield (
            f"{flag} frees the memory of tensors that --cpu-offloading-num-layers moves to the host, which "
            "gains nothing; drop one of them"
        )


def check_precision_and_graphs(args: Any, flag: str) -> Iterator[str]:
    """What rules out freeing outputs at all."""
    for name in ("fp8", "fp4"):
        if argument(args, name):
            yield (
                f"{flag} cannot be used with --{name}-format: the consumer keeps a quantised copy, "
                "so nothing would be freed, and recomputing would change scaling factors a second time; drop "
                "one of them"
            )
    if "mhc" in (argument(args, "recompute_modules") or ()):
        yield (
            f"{flag} cannot be used with --recompute-modules mhc: Megatron frees and recomputes what several "
            "layers' hyper-connections put out together; drop one of them"
        )
    graphs = argument(args, "cuda_graph_impl") or "none"
    if graphs != "none" or argument(args, "enable_cuda_graph") or argument(args, "external_cuda_graph"):
        yield (
            f"{flag} cannot be used with CUDA graphs: a graph holds the addresses of the memory that this "
            "frees; drop --cuda-graph-impl or this"
        )


def check_own_module(args: Any, flag: str, module: str) -> Iterator[str]:
    """Megatron's own module for the same work."""
    if argument(args, "recompute_granularity") == "selective" and module in (
        argument(args, "recompute_modules") or ()
    ):
        yield (
            f"{flag} and --recompute-modules {module} do the same work, the latter in every layer; drop "
            f"{module} from the modules"
        )
