"""FSDP2 of a tiny model in bf16 with experts: sums, norms, shards and checkpoints."""

from __future__ import annotations

import pytest

CASES = "tests.features.data_parallel.fsdp2.cases"


@pytest.mark.parametrize(
    ("world_size", "sharding_size"),
    [(2, None), *(pytest.param(4, size, marks=pytest.mark.full) for size in (2, None))],
)
def test_checkpoints_go_from_ddp_and_back_and_resume(pool, tmp_path, world_size, sharding_size):
    ranks = pool.run(f"{CASES}:life", world_size, folder=str(tmp_path), sharding_size=sharding_size)
    for rank in ranks:
        for with_ddp, sharded in rank["records"]:
            assert sharded["successful"]
            assert sharded["loss"] == pytest.approx(with_ddp["loss"], rel=2e-3), (
                "bf16 weights that began equal"
            )
        first, ours = (record["norm"] for record in rank["records"][0])
        assert ours == pytest.approx(first, rel=1e-6), "sums in fp32, each gradient counted once"
        assert rank["unequal"] == {"ddp to fsdp2": [], "fsdp2 to ddp": [], "resumed": []}
        pieces = sharding_size or world_size
        assert rank["share"] == 1 / pieces
        assert rank["dims"] == {0, 1}, "odd numbers of rows, and six of them in quarters"
        assert rank["units"] == [
            *("FSDPFloat16Module", "FSDPLanguageModelEmbedding"),
            *("FSDPTransformerLayer", "FSDPColumnParallelLinear"),
        ]
        assert 0 < rank["whole"] < rank["of"] / 2, "experts, and what has no equal pieces"
    with_ddp, sharded = ranks[0]["contents"]
    assert sharded == with_ddp, "the same keys and shapes"


def test_a_sharding_size_that_does_not_divide_is_refused(pool):
    (said, _) = pool.run(f"{CASES}:refusal", 2, fsdp2_sharding_size=3)
    assert said.startswith(
        "SettingsError: fsdp2: --fsdp2-sharding-size 3 must be 2 or more and divide the 2 ranks"
    )
