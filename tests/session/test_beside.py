"""Other libraries that patch Megatron in the same process: refused, named, or trained with.

If ``MINDSPEED`` names a checkout, MindSpeed's own engine and flags patch. A stand-in with the same behaviour
runs everywhere.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest

import mindspeed_dsa
from mindspeed_dsa import Flag, PatchError, SettingsError
from mindspeed_dsa.session import beside
from mindspeed_dsa.tools.cli import doctor
from tests.support import fork

SCALE = "corp_megatron.core.layers.scale"
SWAP = Flag("--swap-optimizer", "switch")
NPU = (
    "torch_npu",
    "torch_npu.contrib",
    "torch_npu.contrib.transfer_to_npu",
    "torch_npu.npu",
    "torch_npu.npu.amp",
)


@pytest.fixture
def megatron(tmp_path, monkeypatch):
    """Return a function that registers features on a fork."""
    with fork.features_in(tmp_path, monkeypatch) as register:
        yield register


def calls():
    return sys.modules["corp_megatron_impl"].CALLS


class Alike:
    """Engine that patches at once, replaces or wraps by the function's name, and lists its patches."""

    def __init__(self):
        self.patches_info = {}

    def register_patch(self, target, function):
        self.patches_info[target] = function

    def apply_patches(self):
        for target, function in self.patches_info.items():
            module, _, name = target.rpartition(".")
            owner = importlib.import_module(module)
            wraps = function.__name__.endswith("wrapper")
            setattr(owner, name, function(getattr(owner, name)) if wraps else function)

    def register_features_args(self, parser):
        parser.add_argument("--swap-optimizer", action="store_true")
        parser.add_argument("--use-ascend-coc", action="store_true")


def alike(monkeypatch):
    """Load the stand-in as MindSpeed's engine."""
    engine = Alike()
    for patcher in (each.engine or each.flags for each in beside.PATCHERS[:1]):
        monkeypatch.setitem(
            sys.modules, patcher.partition(":")[0], SimpleNamespace(MindSpeedPatchesManager=engine)
        )
    flags = SimpleNamespace(MindSpeedFeaturesManager=engine)
    monkeypatch.setitem(sys.modules, "mindspeed.features_manager.features_manager", flags)
    return engine


def real(monkeypatch):
    """Load MindSpeed's engine and features, with a stub of torch_npu, which they only import."""
    monkeypatch.syspath_prepend(os.environ["MINDSPEED"])
    for name in NPU:
        stands_in = MagicMock(__path__=[], __version__="2.7.1", __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, stands_in)
    importlib.import_module("mindspeed.features_manager.features_manager")
    manager = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager
    monkeypatch.setattr(manager, "patches_info", {})
    return manager


@pytest.fixture(
    params=[
        alike,
        pytest.param(
            real,
            marks=pytest.mark.skipif(
                "MINDSPEED" not in os.environ, reason="MINDSPEED names no checkout of MindSpeed"
            ),
        ),
    ]
)
def mindspeed(request, monkeypatch):
    yield request.param(monkeypatch)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindspeed"]:
        del sys.modules[name]


def times_seven(x, factor=2):
    return 7 * x


def times_seven_wrapper(original):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return 7 * original(*args, **kwargs)

    return wrapper


def bare_wrapper(original):
    return lambda *args, **kwargs: 7 * original(*args, **kwargs)


@pytest.mark.parametrize("patch", [times_seven, times_seven_wrapper, bare_wrapper])
def test_mindspeed_that_came_first_is_refused_at_once(megatron, mindspeed, patch):
    megatron("swapping", flags=(SWAP,))
    mindspeed.register_patch(SCALE, patch)
    mindspeed.apply_patches()
    with pytest.raises(SettingsError, match="MindSpeed has patched 1 functions of this process") as refused:
        mindspeed_dsa.enable(swap_optimizer=True)
    said = str(refused.value)
    assert SCALE in said, "what it has patched"
    assert "--swap-optimizer would act twice" in said, "the flag that both know"
    assert "remove `import mindspeed.megatron_adaptor`" in said
    assert "docs/migrate.md" in said
    assert mindspeed_dsa.report() == []
    mindspeed_dsa.enable()  # nothing of ours is on


@pytest.mark.parametrize("patch", [times_seven, times_seven_wrapper, bare_wrapper])
def test_mindspeed_that_comes_second_is_refused_with_the_arguments_and_with_every_model(
    megatron, mindspeed, patch
):
    megatron()
    mindspeed_dsa.enable(use_counting=True)
    consumer = importlib.import_module("corp_megatron.core.consumer")
    language_module = importlib.import_module(
        "corp_megatron.core.models.common.language_module.language_module"
    )
    mindspeed_dsa.validate(SimpleNamespace())  # it is imported, and has patched nothing
    mindspeed.register_patch(SCALE, patch)
    mindspeed.apply_patches()
    with pytest.raises(SettingsError, match="MindSpeed has patched 1 functions"):
        mindspeed_dsa.validate(SimpleNamespace())
    for _ in range(2):
        with pytest.raises(PatchError, match="MindSpeed has patched 1 functions"):
            language_module.LanguageModule()
    del calls()[:]
    consumer.use(3)
    assert calls() == [] or patch is not times_seven, "everything is undone that nobody wraps"
    mindspeed_dsa.disable()
    assert language_module.LanguageModule("config").config == "config"


def test_flags_that_both_know_are_counted_where_none_is_given(megatron, mindspeed):
    megatron(flags=(Flag("--use-counting", "switch"), SWAP))
    mindspeed.register_patch(SCALE, times_seven)
    with pytest.raises(SettingsError, match=r"both know 1 flags, as --swap-optimizer"):
        mindspeed_dsa.enable(use_counting=True)


@pytest.fixture
def liger(monkeypatch):
    """Return a module with Liger-Kernel's name that defines the test's functions."""
    module = ModuleType("liger_kernel.megatron.monkey_patch")
    for name in ("times_seven", "times_seven_wrapper"):
        code = globals()[name].__code__
        setattr(module, name, FunctionType(code, vars(module), name, globals()[name].__defaults__))
    module.functools = functools
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("first", [True, False])
def test_a_library_that_wraps_trains_with_us_and_is_named(megatron, liger, first, capsys, tmp_path):
    megatron()
    if not first:
        mindspeed_dsa.enable(use_counting=True)
    layers = importlib.import_module("corp_megatron.core.layers")
    layers.scale = liger.times_seven_wrapper(layers.scale)
    if first:
        mindspeed_dsa.enable(use_counting=True)
    mindspeed_dsa.finalize(str(tmp_path))
    assert layers.scale(3) == 42
    assert calls() == [(3,)]
    assert "note: liger_kernel has changed corp_megatron.core.layers:scale" in capsys.readouterr().err
    (row,) = json.loads((tmp_path / "mindspeed_dsa.json").read_text())["beside"]
    assert row == {"library": "liger_kernel", "places": ["corp_megatron.core.layers:scale"], "dropped": []}


def test_a_library_that_we_replace_is_said_to_be_out(megatron, liger, capsys):
    megatron("tens", "tenfold", "replace")
    layers = importlib.import_module("corp_megatron.core.layers")
    layers.scale = liger.times_seven
    mindspeed_dsa.enable(use_tens=True)
    mindspeed_dsa.finalize()
    assert layers.scale(3) == 30
    assert (
        "note: the function of liger_kernel in place of corp_megatron.core.layers:scale is no longer called"
        in capsys.readouterr().err
    )


def test_a_library_that_drops_ours_is_refused_by_name_with_the_way_out(megatron, liger):
    megatron()
    mindspeed_dsa.enable(use_counting=True)
    layers = importlib.import_module("corp_megatron.core.layers")
    layers.scale = liger.times_seven
    with pytest.raises(PatchError) as refused:
        mindspeed_dsa.finalize()
    (problem,) = refused.value.problems
    assert "re-patched it with liger_kernel.megatron.monkey_patch.times_seven" in problem
    assert "does not call what it replaced; switch one of the two off" in problem


def test_nobody_beside_is_nobody_named(megatron, capsys, tmp_path):
    megatron()
    mindspeed_dsa.enable(use_counting=True)
    importlib.import_module("corp_megatron.core.consumer")
    mindspeed_dsa.finalize(str(tmp_path))
    assert "note:" not in capsys.readouterr().err
    assert json.loads((tmp_path / "mindspeed_dsa.json").read_text())["beside"] == []


@pytest.mark.parametrize(
    ("line", "library", "refused"),
    [
        ("import mindspeed.megatron_adaptor", "MindSpeed", True),
        ("from mindspeed_llm import megatron_adaptor", "MindSpeed", True),
        ("import megatron_adaptor", "MegatronAdaptor", True),
        ("from mindspeed.utils import get_batch", "MindSpeed", False),
    ],
)
def test_doctor_reads_the_script(megatron, tmp_path, line, library, refused):
    megatron()
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(f"import mindspeed_dsa.megatron_adaptor\n{line}\nfrom megatron.core import mpu\n")
    findings = doctor.examine(["--use-counting", "--", str(script)])
    assert findings["features"][-1]["on"] is True
    (row,) = (entry for entry in findings["beside"] if entry["imports"])
    assert (row["library"], row["imports"]) == (library, [f"{script} line 2: {line}"])
    assert f"imported by {script} line 2: {line}" in " ".join(doctor.as_text(findings).split())
    problems = [entry for entry in findings["problems"] if str(script) in entry]
    assert len(problems) == refused
    assert not refused or f"{library} patches what this library patches; remove" in problems[0]
    idle = doctor.examine(["--", str(script)])
    assert not [entry for entry in idle["problems"] if str(script) in entry], "nothing of ours is on"


def test_doctor_shows_two_installations(megatron, tmp_path, monkeypatch):
    megatron()
    other = tmp_path / "checkout"
    fork.write(other, names=("core/package_info.py",))
    monkeypatch.setattr(sys, "path", [*sys.path, str(other)])
    findings = doctor.examine(["--use-counting"])
    assert findings["megatron"] == [f"0.16.1 in {tmp_path}", f"0.16.1 in {other}"]
    told = " ".join(doctor.as_text(findings).split())
    assert f"megatron-core 0.16.1 in {tmp_path} is used, and hides 0.16.1 in {other}" in told
