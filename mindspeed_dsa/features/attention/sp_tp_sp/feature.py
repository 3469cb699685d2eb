"""SP-TP-SP: MLA whose down and output projections run on the rank's sequence shard with full weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument, cuts_of_muon
from mindspeed_dsa.megatron.dsa import MLA
from mindspeed_dsa.megatron.low_precision import check_own_products
from mindspeed_dsa.patches.spec import Patch


def check_sp_tp_sp(args: Any, options: Any) -> Sequence[str]:
    """Return a problem per argument that SP-TP-SP does not support; skip those that ``args`` lacks."""
    flag, problems = "--mla-sp-tp-sp", []
    if argument(args, "multi_latent_attention") is False:
        problems.append(f"{flag} is for latent attention; add --multi-latent-attention or omit it")
    if argument(args, "experimental_attention_variant") == "dsa":
        problems.append(
            f"{flag} is for dense latent attention; with DSA use --context-parallel-size, which shares the "
            "work as evenly and keeps no whole projection"
        )
    if argument(args, "transformer_impl") == "transformer_engine":
        problems.append(f"{flag} works with Megatron's own modules; add --transformer-impl local or omit it")
    if argument(args, "tensor_model_parallel_size") == 1 or argument(args, "sequence_parallel") is False:
        problems.append(
            f"{flag} exchanges heads for rows among tensor parallel ranks that share a sequence; add "
            "--sequence-parallel and a --tensor-model-parallel-size of at least 2, or omit it"
        )
    if argument(args, "ckpt_format") == "torch":
        problems.append(
            f"{flag} keeps whole weights, of which checkpoints of the format torch hold parts; use "
            "--ckpt-format torch_dist"
        )
    problems += check_own_products(args, flag)
    if argument(args, "use_megatron_fsdp"):
        problems.append(f"{flag} keeps whole weights, which --use-megatron-fsdp would cut; omit one of them")
    if muon := cuts_of_muon(args):
        problems.append(f"{flag} keeps whole weights, and {muon}; add --muon-tp-mode duplicated, or omit one")
    return problems


FEATURE = Feature(
    name="mla-sp-tp-sp",
    summary="Latent attention by rows, by heads and by rows again: an all-to-all behind a whole output "
    "projection in place of a reduce-scatter.",
    flags=(
        Flag(
            "--mla-sp-tp-sp",
            "With tensor and sequence parallelism: gather latents, attend by head, exchange heads for rows, "
            "and project the own rows with whole weights.",
        ),
    ),
    requires=Requires(features=("dense-context-parallel",)),
    check=check_sp_tp_sp,
    doc="mla-sp-tp-sp.md",
    patches=(
        Patch(
            f"{MLA}:MLASelfAttention.__init__",
            "wrap",
            "mindspeed_dsa.features.attention.sp_tp_sp.layers:project_own_rows",
            "down projections and the output projection must be whole on every rank",
            params=("config", "submodules", "layer_number"),
        ),
    ),
)
