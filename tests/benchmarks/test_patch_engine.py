"""The benchmark measures the declared figures, and its output follows the contract."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import off_snapshot, patch_engine, stub_packages
from benchmarks.registry import CASES, Case
from tests.support.figures import numbers


def test_output_contract(monkeypatch, capsys, tmp_path):
    fake = ModuleType("fake_benchmark")

    def run(device):
        print("a greeting of the measured code")
        return {"speed": 1.5, "by_size": {"128": 2}}

    fake.run = run
    monkeypatch.setitem(sys.modules, "fake_benchmark", fake)
    monkeypatch.setitem(CASES, "fake", Case("fake", "a fake", "fake_benchmark", on_device=False))
    file = tmp_path / "result.json"
    assert cli.main(["fake", "--device", "cpu", "--json", str(file)]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    result = json.loads(line)
    assert list(result) == ["case", "metrics", "device", "versions", "date"]
    assert (result["case"], result["metrics"]) == ("fake", {"speed": 1.5, "by_size": {"128": 2}})
    assert result["device"].startswith("cpu")
    assert result["versions"]["python"] == sys.version.split()[0]
    assert "a greeting" in captured.err
    assert json.loads(file.read_text()) == result


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["patch-engin"])
    assert caught.value.code == 2
    assert "patch-engine" in capsys.readouterr().err


@pytest.mark.full
def test_every_metric_of_the_case(monkeypatch):
    ratio, engine = patch_engine.call_ratio, patch_engine.engine_ms
    monkeypatch.setattr(patch_engine, "call_ratio", lambda calls, rounds: ratio(calls=2000, rounds=5))
    monkeypatch.setattr(
        patch_engine, "engine_ms", lambda modules, sites, rounds: engine(modules=90, sites=30, rounds=2)
    )
    importing = patch_engine.import_ms
    monkeypatch.setattr(patch_engine, "import_ms", lambda rounds: importing(rounds=1))
    metrics = CASES["patch-engine"].run("cpu")
    assert list(metrics) == [
        "call_ratio",
        "arm_200_ms",
        "check_200_ms",
        "finalize_200_ms",
        "import_ms",
        "patched_when_off",
        "platform_sites",
    ]
    assert all(type(value) in (int, float) and value >= 0 for value in numbers(metrics))
    assert metrics["call_ratio"] > 0
    assert metrics["patched_when_off"] == 0
    if not torch.cuda.is_available() and find_spec("torch_npu") is None:
        assert metrics["platform_sites"] > 0, "the CPU platform redirects, and nothing else changed"


def test_stubs_are_as_large_as_declared():
    with stub_packages.on_disk(modules=40, sites=10) as stubs:
        stubs.load()
        sizes = {
            len([n for n in vars(sys.modules[name]) if not n.startswith("__")]) for name in stubs.modules
        }
        kinds = {claim.patch.kind for claim in stubs.claims}
    assert sizes == {50}
    assert len(stubs.claims) == 10
    assert kinds == {"wrap"}, "the first ten sites are the ones whose originals are held"
    assert stub_packages.PACKAGE not in sys.modules


def test_a_measurement_of_patches_that_are_not_there_is_refused():
    with stub_packages.on_disk(modules=30, sites=10) as stubs:
        stubs.load()
        manager = patch_engine.PatchManager()
        manager.plan(stubs.claims)
        with pytest.raises(RuntimeError, match="the measured patches are not in place"):
            patch_engine._require_all_applied(manager)


class Sample:
    kept, replaced, removed = 1, 2, 3


def test_the_snapshot_sees_every_change(monkeypatch):
    module = ModuleType("sample_module")
    module.Sample, module.kept, module.replaced = Sample, object(), object()
    monkeypatch.setitem(sys.modules, "sample_module", module)
    owners = [o for o in off_snapshot.owners() if o.thing in (module, Sample)]
    assert len(owners) == 2
    before = [(owner, owner.bindings()) for owner in owners]

    module.replaced = module.added = print
    module.submodule = ModuleType("sample_module.submodule")
    monkeypatch.setattr(Sample, "replaced", 4)
    monkeypatch.delattr(Sample, "removed")

    def changed(places=frozenset(), objects=None):
        return {
            n.rpartition(".")[2]
            for o, old in before
            for n in off_snapshot.changes(o, old, places, objects or {})
        }

    assert changed() == {"replaced", "added", "removed"}
    assert changed(places={(id(Sample), "replaced"), (id(Sample), "removed")}) == {"replaced", "added"}
    assert changed(objects={id(print): print}) == {"replaced", "removed"}
