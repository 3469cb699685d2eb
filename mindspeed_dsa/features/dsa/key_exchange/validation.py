"""What DSA cannot be combined with under context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.features.dsa.key_exchange.options import GATHER, Options
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.dsa import Options as Fused
from mindspeed_dsa.patches import versions

_OWN_CODE = SpecifierSet("<0.19", prereleases=True)
_WHOLE_ROLL = SpecifierSet("<0.14", prereleases=True)


def check_dsa_context_parallel(args: Any, options: Options) -> Iterator[str]:
    """Report what cannot be trained; absent arguments are not checked."""
    if options.ranks == 1:
        return
    others = options.all_of(GATHER) - {GATHER}
    if others:
        yield (
            f"DSA's attention gathers keys, and {', '.join(sorted(others))} was named; use "
            "kvallgather_cp_algo"
        )
    release = versions.of_megatron(getattr(args, "megatron_root", "megatron"))
    if release is None or release not in _OWN_CODE:
        return
    fused = Fused.of(args)
    if release in SpecifierSet(">=0.16", prereleases=True) and not fused.all_ours:
        yield (
            f"Megatron-core {release} has no context parallelism for DSA in its own code; add "
            "--use-fused-dsa and omit --no-use-fused-..., or use --context-parallel-size 1"
        )
    if not fused.absorb:
        yield (
            "context parallel ranks share the latent key of DSA's absorbed form; add --use-dsa-absorb or use "
            "--context-parallel-size 1"
        )
    if release in _WHOLE_ROLL and argument(args, "mtp_num_layers"):
        yield (
            f"Megatron-core {release} shifts the labels of multi-token prediction within a rank's rows; use "
            "0.14 or later, or omit --mtp-num-layers"
        )
