"""Every feature that serves NPUs trains on tensors of the device, with the CPU platform's losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_dsa import features, platforms, session
from tests.npu import device_jobs, feature_cases, kernels
from tests.npu.feature_cases import LIMIT, require_as_on_a_cpu, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for files of the cases."""
    return tmp_path_factory.mktemp("features")


@pytest.mark.skipif(not kernels.torch_npu_is("2.10"), reason="fsdp2 needs torch 2.10, and is a case")
def test_every_feature_that_serves_npus_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "detect", lambda requested: "npu")
    trained = set()
    for flags in (flags for cases in feature_cases.CASES.values() for flags in cases.values()):
        variant = [] if feature_cases.DENSE in flags else ["--experimental-attention-variant", "dsa"]
        argv = [*device_jobs.MODEL.split(), *feature_cases.complete(flags, "bf16").split(), *variant]
        _, active = session.resolve({}, argv, complete=False)
        trained |= {feature.name for feature in active}
    serving = {
        feature.name
        for feature in features.built_in()
        if "npu" in (feature.requires.platforms or ("npu",)) and not feature.name.startswith("cpu-")
    }
    assert serving - trained == feature_cases.ELSEWHERE.keys()


@pytest.mark.timeout(2 * LIMIT + 100)
@pytest.mark.parametrize(("precision", "name"), rows(1))
def test_a_feature_trains_as_on_a_cpu(precision: str, name: str, folder: Path) -> None:
    require_as_on_a_cpu(1, precision, name, folder)
