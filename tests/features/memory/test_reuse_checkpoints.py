from __future__ import annotations

import pytest

JOB = "tests.features.memory.job"
DISTRIBUTED = ("fully_reshardable", "dp_reshardable", "torch")
STATE = ("weights", "masters", "moments")


QUICK = {(True, "fully_reshardable"), (False, "torch_dist")}


def cases():
    ways = [(True, way) for way in DISTRIBUTED] + [(False, way) for way in ("torch_dist", "torch")]
    for distributed, way in ways:
        yield pytest.param(
            way,
            {"distributed": distributed},
            id=f"{'distributed' if distributed else 'plain'}, {way}",
            marks=[] if (distributed, way) in QUICK else pytest.mark.full,
        )


def run(pool, ranks, **arguments):
    return pool.run(f"{JOB}:train", ranks, **arguments)


def resumed(pool, ranks, folder, way, reuse, options):
    return run(pool, ranks, steps=2, first=3, load=(way, str(folder)), reuse=reuse, **options)


@pytest.mark.parametrize(("way", "options"), list(cases()))
def test_saved_and_loaded_with_the_flag_on_or_off(pool, tmp_path, way, options):
    ranks = 2
    reference = run(pool, ranks, steps=5, reuse=False, **options)
    for saved_with in (True, False):
        folder = tmp_path / str(saved_with)
        folder.mkdir()
        at_save = run(pool, ranks, steps=3, save=(way, str(folder)), reuse=saved_with, **options)
        for loaded_with in {not saved_with, True}:
            results = resumed(pool, ranks, folder, way, loaded_with, options)
            for result, whole, before in zip(results, reference, at_save, strict=True):
                for what in STATE:
                    assert result["loaded"][what] == before[what], f"{what} as saved"
                    assert result[what] == whole[what], f"{what} as without a break"
                assert result["records"] == whole["records"][3:]
                assert result["voided"] == loaded_with


@pytest.mark.parametrize(("way", "options"), [case for case in cases() if case.values[0] != "torch"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_at_another_data_parallel_size(pool, tmp_path, way, options, before, after):
    run(pool, before, steps=3, save=(way, str(tmp_path)), reuse=True, **options)
    off = resumed(pool, after, tmp_path, way, False, options)
    on = resumed(pool, after, tmp_path, way, True, options)
    for without, having in zip(off, on, strict=True):
        assert having["loaded"] == without["loaded"]
        for what in ("records", *STATE):
            assert having[what] == without[what], what
        assert (having["voided"], without["voided"]) == (True, False)
