from __future__ import annotations

import pytest

from tests.support.optimizer_training import COMPARED, DISTRIBUTED, JOB, OFF, PLAIN

ON = {
    "reuse-fp32-param": {"reuse_fp32_param": True},
    "swap-optimizer": {"swap_optimizer": True},
    "virtual-optimizer": {"virtual_optimizer": ["all"]},
}
STATE = ("weights", "masters", "moments")
WAYS = [
    *((DISTRIBUTED, way) for way in ("fully_reshardable", "dp_reshardable", "torch")),
    *((PLAIN, way) for way in ("torch_dist", "torch")),
]
OLDER = [(DISTRIBUTED, "dp_zero_gather_scatter")]
QUICK = {"swap-optimizer, distributed, dp_reshardable"}


def cases(ways):
    for feature, switches in ON.items():
        for options, way in ways:
            name = f"{feature}, {'distributed' if options else 'plain'}, {way}"
            yield pytest.param(
                switches, way, options, id=name, marks=[] if name in QUICK else pytest.mark.full
            )


def run(pool, ranks, **arguments):
    return pool.run(f"{JOB}:train", ranks, **arguments)


def resumed(pool, ranks, folder, way, switches, options):
    return run(pool, ranks, steps=2, first=3, load=(way, str(folder)), switches=switches, **options)


@pytest.mark.parametrize(("on", "way", "options"), list(cases(WAYS + OLDER)))
def test_saved_and_loaded_with_the_feature_on_or_off(pool, tmp_path, on, way, options):
    ranks = 2
    reference = pool.baseline(f"{JOB}:train", ranks, steps=5, **options)
    placed = {}
    for name, saved_with, loaded_with in (("on", on, (OFF, on)), ("off", OFF, (on,))):
        folder = tmp_path / name
        folder.mkdir()
        at_save = run(pool, ranks, steps=3, save=(way, str(folder)), switches=saved_with, **options)
        placed[name] = at_save[0]["placed"]
        for switches in loaded_with:
            results = resumed(pool, ranks, folder, way, switches, options)
            for result, whole, before in zip(results, reference, at_save, strict=True):
                for what in STATE:
                    assert result["loaded"][what] == before[what], f"{what} as saved"
                    assert result[what] == whole[what], f"{what} as without a break"
                assert result["records"] == whole["records"][3:]
                assert result["placed"] == (placed["on"] if switches is on else whole["placed"])
    assert placed["on"] != placed["off"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("on", "way", "options"), [case for case in cases(WAYS) if case.values[1] != "torch"]
)
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_at_another_data_parallel_size(pool, tmp_path, on, way, options, before, after):
    run(pool, before, steps=3, save=(way, str(tmp_path)), switches=on, **options)
    off = resumed(pool, after, tmp_path, way, OFF, options)
    having = resumed(pool, after, tmp_path, way, on, options)
    for without, result in zip(off, having, strict=True):
        assert result["loaded"] == without["loaded"]
        for what in COMPARED:
            assert result[what] == without[what], what
        assert result["placed"] != without["placed"]
