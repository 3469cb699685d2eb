"""The main job on context parallel ranks is the same training as in one process."""

from __future__ import annotations

import pytest

from tests.distributed.parity import EP2, PP2, SHALLOW, TP2, VPP2, ZERO, Lab, Layout


def cp(size: int, block_rows: int = 0, **more):
    """Flags and switches; Megatron's own flag is read from either."""
    flags = f"--context-parallel-size {size}" + (f" --cp-block-rows {block_rows}" if block_rows else "")
    switches = {"use_fused_dsa": True, "context_parallel_size": size, **more}
    return flags, {**switches, "cp_block_rows": block_rows} if block_rows else switches


def layout(name: str, ranks: int, size: int, flags: str = "", model: str = "", **more) -> Layout:
    own, switches = cp(size, **more)
    return Layout(name, ranks, f"{own} {flags}", model, switches=switches)


OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
# With per-token loss Megatron weighs a rank's share of the balancing loss by its own tokens only.
MTP = "--mtp-num-layers 1 --calculate-per-token-loss --moe-router-load-balancing-type none"
SWAP = {"swap_attention": True, "swap_attention_min_bytes": 0, "swap_modules": "input_norm,self_attention"}
SELECTIVE = "--recompute-granularity selective --recompute-modules"
INTERLEAVED = f"{PP2} {VPP2} --microbatch-group-size-per-virtual-pipeline-stage 2"
QUICK = (layout("CP2 x PP2", 4, 2, PP2, "--num-layers 2"),)
TEN_STEPS = (
    layout("CP2", 2, 2, model=SHALLOW),
    layout("CP2, keys kept", 2, 2, model=SHALLOW, cp_keep_gathered=True),
    layout("CP2, blocks of 4 rows", 2, 2, model=SHALLOW, block_rows=4),
    layout("CP4", 4, 4, model=SHALLOW),
    layout("CP2 x TP2+SP", 4, 2, TP2, SHALLOW),
    layout("CP2 x PP2 x VPP2", 4, 2, INTERLEAVED, SHALLOW),
    layout("CP2 x EP2", 2, 2, EP2, SHALLOW),
)
FIVE_STEPS = (
    layout("CP2, loss in backward", 2, 2, dsa_fuse_kl_in_backward=True),
    layout("CP3", 3, 3, model="--seq-length 48 --max-position-embeddings 48"),
    layout("CP2 x DP2, distributed optimizer, overlap", 4, 2, f"{ZERO} {OVERLAP}"),
    layout("CP2, MTP", 2, 2, model=MTP),
    layout("CP2, MTP, blocks of 4 rows", 2, 2, model=MTP, block_rows=4),
    layout("CP2, no indexer loss", 2, 2, "--overlap-grad-reduce", "--dsa-indexer-loss-coeff 0"),
    layout("CP2, core attention recomputed", 2, 2, f"{SELECTIVE} core_attn"),
    layout("CP2, attention swapped", 2, 2, **SWAP),
)


def name_of(layout: Layout) -> str:
    return layout.name


@pytest.mark.parametrize("layout", QUICK, ids=name_of)
def test_ten_steps_as_in_one_process(ten_steps: Lab, layout: Layout) -> None:
    ten_steps.check(layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", TEN_STEPS, ids=name_of)
def test_more_layouts_take_ten_steps_as_one_process(ten_steps: Lab, layout: Layout) -> None:
    ten_steps.check(layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", FIVE_STEPS, ids=name_of)
def test_other_combinations_train_as_one_process(lab: Lab, layout: Layout) -> None:
    lab.check(layout)
