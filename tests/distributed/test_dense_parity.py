"""The main job with dense latent attention on several ranks is the same training as in one process."""

from __future__ import annotations

import pytest

from tests.distributed.parity import EP2, PP2, TP2, VPP2, ZERO, Lab, Layout

DENSE = "--experimental-attention-variant none --num-layers 4 --num-attention-heads 8"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
CORE_RECOMPUTE = "--recompute-granularity selective --recompute-modules core_attn"
RING, HEADS, HYBRID = "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"
# With per-token loss Megatron weighs a rank's share of the balancing loss by its own tokens only.
INTERLEAVED = f"{PP2} {VPP2} --microbatch-group-size-per-virtual-pipeline-stage 2"
MTP = "--mtp-num-layers 1 --calculate-per-token-loss --moe-router-load-balancing-type none"


def layout(
    name: str, ranks: int, cp: int, algorithm: str, flags: str = "", model: str = "", **more: object
) -> Layout:
    switches = {"context_parallel_size": cp, "context_parallel_algo": algorithm, **more}
    return Layout(
        f"dense, {name}",
        ranks,
        f"--context-parallel-size {cp} {flags}",
        f"{DENSE} {model}",
        switches=switches,
    )


SP_TP_SP = {"mla_sp_tp_sp": True}
LAYOUTS = (
    layout("ring of 2", 2, 2, RING),
    layout("ring of 3", 3, 3, RING, model="--seq-length 48 --max-position-embeddings 48"),
    layout("ring of 2 x TP2+SP", 4, 2, RING, TP2),
    layout("ring of 2 x PP2", 4, 2, RING, PP2),
    layout("ring of 2 x PP2 x VPP2", 4, 2, RING, INTERLEAVED),
    layout("ring of 2 x EP2, distributed optimizer, overlap", 2, 2, RING, f"{EP2} {ZERO} {OVERLAP}"),
    layout("ring of 2, core attention recomputed", 2, 2, RING, CORE_RECOMPUTE),
    layout("ring of 2, MTP", 2, 2, RING, model=MTP),
    layout("heads over 4", 4, 4, HEADS),
    layout("heads over 2 x TP2+SP", 4, 2, HEADS, TP2),
    Layout("dense, TP2+SP", 2, TP2, DENSE),
    Layout("dense, SP-TP-SP over 2", 2, TP2, DENSE, switches=SP_TP_SP),
    Layout(
        "dense, SP-TP-SP over 2 x DP2, distributed optimizer", 4, f"{TP2} {ZERO}", DENSE, switches=SP_TP_SP
    ),
    layout("SP-TP-SP over 2 x ring of 2", 4, 2, RING, TP2, mla_sp_tp_sp=True),
)

pytestmark = pytest.mark.full


def test_heads_over_two_and_a_ring_of_two_take_ten_steps_as_one_process(ten_steps: Lab) -> None:
    ten_steps.check(layout("heads over 2, ring of 2", 4, 4, HYBRID, ulysses_degree_in_cp=2))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_trains_as_one_process(lab: Lab, layout: Layout) -> None:
    lab.check(layout)
