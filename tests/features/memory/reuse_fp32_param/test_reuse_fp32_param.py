"""Storage shared by weights and master weights; see also ``test_optimizer_features.py``."""

from __future__ import annotations

import pytest

from tests.support.optimizer_training import COMPARED, DISTRIBUTED, JOB, PLAIN, assert_same_training

ON = {"reuse_fp32_param": True}


@pytest.mark.parametrize(
    "options", [pytest.param(PLAIN, marks=pytest.mark.full), DISTRIBUTED], ids=["plain", "distributed"]
)
def test_without_clipping(pool, options):
    assert_same_training(pool, 1, ON, steps=4, clip=0.0, **options)


@pytest.mark.full
def test_small_blocks_make_the_same_training(pool):
    (whole,) = pool.run(f"{JOB}:train", 1, switches=ON, steps=3, distributed=True)
    (blocks,) = pool.run(f"{JOB}:train", 1, switches=ON, steps=3, distributed=True, block=64)
    for what in COMPARED:
        assert blocks[what] == whole[what], what
