"""Registry rows about sequence lengths that the ranks do not divide; the other rows are in ``layouts.py``.

The reference is one process without padding: losses, gradients and weights after ten steps.
"""

from __future__ import annotations

from functools import partial

from tests.distributed.flags import (
    DENSE,
    EP2,
    FOUR_MICROBATCHES,
    FULL_RECOMPUTE,
    FUSED,
    INTERLEAVED,
    MTP,
    PACK,
    PACKED,
    PAIRS,
    PER_TOKEN_ALONE,
    PP2,
    SHALLOW,
    TP2,
)
from tests.distributed.parity import Bounds, Layout
from tests.distributed.rows import row
from tests.features.moe.batch_overlap.layer_in_halves import ATTENTION as HALVES_OF_ATTENTION
from tests.support import memory_events as events

# Rounding causes a hundredth of these bounds. A padding token that counts, or a real token that does not,
# would cause 1/30.
BOUNDS = Bounds(loss=1e-6, grad_norm=1e-5, first_gradient=1e-5, last_gradient=1e-4, update=1e-3)
ODD = f"{SHALLOW} --seq-length 29"
# Covers the router's losses, token counts and expert biases.
BALANCED = (
    f"{ODD} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
ODD_PACKS = f"{SHALLOW} --seq-length 253 {PER_TOKEN_ALONE}"
padded = partial(row, "pad-sequences", model=ODD, bounds=BOUNDS, steps=10)
dsa = partial(padded, **FUSED)
dense = partial(padded, model=f"{DENSE} --seq-length 29")
packs = partial(
    padded,
    model=ODD_PACKS,
    reference=Layout("packs of an odd length", 1, PACK, ODD_PACKS, switches=PACKED),
    blocks=16,
    **PACKED,
)

PADDED = (
    dsa("CP2", 2, cp=2),
    dsa("TP2+SP", 2, TP2),
    dsa("CP2 x TP2+SP", 4, TP2, cp=2),
    dsa("CP2 x PP2", 4, PP2, cp=2),
    dsa("CP2 x TP2+SP, routers' losses and biases", 4, TP2, model=BALANCED, cp=2),
    dsa(
        "CP2 x PP2 x VPP2 x EP2, pairs recomputed",
        4,
        f"{INTERLEAVED} {EP2} {FULL_RECOMPUTE} {FOUR_MICROBATCHES}",
        model=BALANCED,
        reference=Layout("four odd microbatches", 1, FOUR_MICROBATCHES, BALANCED),
        cp=2,
        **PAIRS,
    ),
    dsa("CP2 x TP2+SP, MTP", 4, TP2, model=f"{ODD} {MTP}", cp=2),
    dsa("CP2, loss in backward, blocks of 2 rows", 2, cp=2, blocks=2, dsa_fuse_kl_in_backward=True),
    dsa(
        "CP2 x EP2, attention in halves",
        2,
        EP2,
        model=BALANCED,
        watched=(events.STARTED, events.ATTENDED),
        **HALVES_OF_ATTENTION,
        cp=2,
    ),
    dsa("CP2 x TP2+SP, second stream", 4, TP2, cp=2, two_streams=True, watched=(events.BESIDE,)),
    dense("ring of 2, dense", 2, cp=2, context_parallel_algo="megatron_cp_algo"),
    dense("heads over 2 x TP2+SP, dense", 4, TP2, cp=2, context_parallel_algo="ulysses_cp_algo"),
    dense("TP2+SP, dense", 2, TP2, mla_sp_tp_sp=True),
    packs("CP2, packs", 2, PACK, cp=2),
    packs("CP2 x TP2+SP, packs", 4, f"{TP2} {PACK}", cp=2),
    packs("CP2 x PP2, packs", 4, f"{PP2} {PACK}", cp=2),
)
