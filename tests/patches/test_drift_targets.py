"""Targets are found in source code where Python would find them at run time, without an import."""

from __future__ import annotations

import sys
import zipfile
from importlib import import_module, invalidate_caches

import pytest

from mindspeed_dsa.patches.drift import Checker
from mindspeed_dsa.patches.source_tree import SourceTree
from tests.support.drift_packages import checker, patch, write

PACKAGE = {
    # No megatron/__init__.py: like the real one, this is a namespace package.
    "megatron/core/__init__.py": "from megatron.core import schedules\nfrom .layers import Linear as Dense\n",
    "megatron/core/layers.py": """
        import functools
        from dataclasses import dataclass, field
        from typing import ClassVar, Generic, TypeVar, overload

        from megatron.core.base import Base
        from .decorate import fuse

        T = TypeVar("T")

        @fuse
        def fused(x, bias=None): ...

        def plain(x): ...
        plain = fuse(plain)

        @overload
        def typed(x: int): ...
        @overload
        def typed(x: str): ...
        def typed(x, *, strict=False): ...

        alias = plain
        partial = functools.partial(plain, 1)
        short = lambda x, scale: x * scale
        REGISTRY = {"gelu": plain, "silu": fused}
        LIMIT: int = 4

        if functools:
            def either(x): ...
        else:
            def either(x, extra): ...

        try:
            from missing_package import Norm
        except ImportError:
            Norm = None

        def replaced(old): ...
        def replaced(new): ...

        def removed(): ...
        del removed

        class Linear(Base, Generic[T]):
            OUTER = 3
            def forward(self, x, weight=None, **kwargs): ...
            @staticmethod
            def shape(x): ...
            @property
            def size(self): ...
            @size.setter
            def size(self, value): ...
            run = forward
            class Inner:
                def deep(self, y): ...

        class Error(ValueError):
            pass

        @dataclass(frozen=True)
        class Parent:
            hidden: int
            COUNT: ClassVar[int] = 0

        @dataclass(frozen=True)
        class Config(Parent):
            layers: int = field(default=1)
        """,
    "megatron/core/decorate.py": "def fuse(function):\n    return function\n",
    "megatron/core/base.py": "class Base:\n    def save(self, folder): ...\n",
    "megatron/core/schedules.py": """
        from typing import TYPE_CHECKING

        from megatron.core.layers import *
        if TYPE_CHECKING:
            from megatron.core.base import Base as OnlyForTypes
        def step(model): ...
        """,
    "megatron/core/moved.py": """
        from .layers import fused as moved, Linear
        import megatron.core.base as base
        """,
    "megatron/core/lazy.py": "def __getattr__(name): ...\n",
    "megatron/core/circle_a.py": "from .circle_b import lost\n",
    "megatron/core/circle_b.py": "from .circle_a import lost\n",
    "megatron/core/future.py": "def broken(:\n",
}

# Rows of target, expected parameters, and the place of the definition.
FOUND = [
    ("layers:fused", ("x", "bias"), "layers:fused"),
    ("layers:plain", ("x",), "layers:plain"),
    ("layers:typed", ("x", "strict"), "layers:typed"),
    ("layers:alias", ("x",), "layers:plain"),
    ("layers:partial", None, "layers:partial"),
    ("layers:short", ("x", "scale"), "layers:short"),
    ("layers:LIMIT", None, "layers:LIMIT"),
    ("layers:either", ("x", "extra"), "layers:either"),
    ("layers:Norm", None, "layers:Norm"),
    ("layers:replaced", ("new",), "layers:replaced"),
    ("layers:Linear.forward", ("self", "x", "weight"), "layers:Linear.forward"),
    ("layers:Linear.run", ("self", "x", "weight"), "layers:Linear.forward"),
    ("layers:Linear.shape", ("x",), "layers:Linear.shape"),
    ("layers:Linear.size", ("self", "value"), "layers:Linear.size"),
    ("layers:Linear.save", ("self", "folder"), "base:Base.save"),
    ("layers:Linear.Inner.deep", ("self", "y"), "layers:Linear.Inner.deep"),
    ("layers:Linear.OUTER", None, "layers:Linear.OUTER"),
    ("layers:Config", ("self", "hidden", "layers"), "layers:Config"),
    ("layers:Config.__init__", ("self", "hidden", "layers"), "layers:Config"),
    ("moved:moved", ("x", "bias"), "layers:fused"),
    ("moved:Linear.save", ("self", "folder"), "base:Base.save"),
    ("moved:base.Base.save", ("self", "folder"), "base:Base.save"),
    ("schedules:fused", ("x", "bias"), "layers:fused"),
    ("schedules:step", ("model",), "schedules:step"),
]


@pytest.fixture(params=["folder", "wheel"])
def tree(request, tmp_path):
    """Return the package as a checkout and as a wheel, an archive without entries for folders."""
    write(tmp_path, PACKAGE)
    if request.param == "folder":
        return SourceTree.folder(tmp_path)
    wheel = tmp_path / "megatron_core-0.16.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in PACKAGE:
            archive.write(tmp_path / name, name)
    return SourceTree.archive(wheel)


@pytest.mark.parametrize(("target", "params", "defined_in"), FOUND, ids=[row[0] for row in FOUND])
def test_finds_what_the_name_stands_for(tree, target, params, defined_in):
    facts = Checker(tree).inspect(patch(f"megatron.core.{target}"))
    assert facts.exists
    assert facts.params == params
    assert facts.defined_in == f"megatron.core.{defined_in}"
    assert facts.has_var_keyword == target.endswith(("Linear.forward", "Linear.run"))


def test_package_names(tree):
    facts = Checker(tree).inspect(patch("megatron.core:Dense.forward"))
    assert facts.defined_in == "megatron.core.layers:Linear.forward"
    facts = Checker(tree).inspect(patch("megatron.core:schedules.step"))
    assert facts.defined_in == "megatron.core.schedules:step"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("megatron.core.gone:x", "no module megatron.core.gone"),
        ("megatron.core.layers:fuse_d", "megatron.core.layers has no fuse_d (is it fused now?)"),
        ("megatron.core.layers:removed", "has no removed"),
        ("megatron.core.layers:Linear.backward", "class Linear of megatron.core.layers has no backward"),
        ("megatron.core.layers:Parent.hidden", "class Parent of megatron.core.layers has no hidden"),
        ("megatron.core.layers:Error.raise_it", "class Error of megatron.core.layers has no raise_it"),
        ("megatron.core.schedules:OnlyForTypes", "has no OnlyForTypes"),
        ("megatron.core.circle_a:lost", "imports lost in a circle"),
    ],
)
def test_missing_says_why(tree, target, reason):
    facts = Checker(tree).inspect(patch(target))
    assert facts.exists is False
    assert reason in facts.reason
    (finding,) = Checker(tree).check(patch(target))
    assert finding.state == "missing"
    assert finding.fatal
    assert target in finding.message


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("megatron.core.lazy:anything", "__getattr__"),
        ("megatron.core.future:broken", "cannot be parsed"),
        ("megatron.core.layers:Linear.__init__", "from object"),
        ("megatron.core.layers:partial.func", "computed when it is imported"),
    ],
)
def test_what_source_cannot_tell_is_not_called_missing(tree, target, reason):
    (finding,) = Checker(tree).check(patch(target))
    assert finding.state == "unknown"
    assert not finding.fatal
    assert reason in finding.message


def test_class_from_code_that_is_not_at_hand(tmp_path):
    files = {"megatron/core/a.py": "import absent_package\nclass A(absent_package.nn.Module): ...\n"}
    facts = checker(tmp_path, files).inspect(patch("megatron.core.a:A.forward"))
    assert facts.exists is None
    assert "absent_package.nn.Module" in facts.reason


def test_bases_are_followed_into_installed_packages(tmp_path):
    files = {"megatron/core/a.py": "import argparse\nclass A(argparse.ArgumentParser): ...\n"}
    check = checker(tmp_path, files)
    facts = check.inspect(patch("megatron.core.a:A.parse_args"))
    assert facts.defined_in == "argparse:ArgumentParser.parse_args"
    assert facts.params is None, "another release of that package may take others"
    assert facts.fingerprint == ""
    # Only the parameters are unknown; a name that is not there is missing.
    assert check.inspect(patch("megatron.core.a:A.parse_nothing")).exists is False


def test_name_for_something_in_another_package(tmp_path):
    # The target is in another package, so its facts must not depend on that package's release.
    text = "import argparse\nfrom argparse import Action\nparse = argparse.ArgumentParser\n"
    check = checker(tmp_path, {"megatron/core/a.py": text})
    facts = check.inspect(patch("megatron.core.a:parse"))
    assert facts.defined_in == "megatron.core.a:parse"
    assert facts.params is None
    other = checker(tmp_path / "b", {"megatron/core/a.py": text.replace("= argparse.A", "= argparse.Some_A")})
    assert facts.fingerprint != other.inspect(patch("megatron.core.a:parse")).fingerprint
    assert check.inspect(patch("megatron.core.a:Action")).defined_in == "argparse:Action"


def test_entries(tmp_path):
    check = checker(tmp_path, PACKAGE)
    gelu = check.inspect(patch("megatron.core.layers:REGISTRY", "entry", key="gelu"))
    silu = check.inspect(patch("megatron.core.layers:REGISTRY", "entry", key="silu"))
    new = check.inspect(patch("megatron.core.layers:REGISTRY", "entry", key="relu"))
    assert gelu.exists
    assert gelu.fingerprint != silu.fingerprint
    assert new.exists
    assert new.fingerprint == ""
    name = check.inspect(patch("megatron.core.layers:__dict__", "entry", key="fused"))
    assert name.params == ("x", "bias")
    gone = patch("megatron.core.layers:__dict__", "entry", key="unfused")
    assert check.inspect(gone).exists is False


def test_namespace_package_over_two_folders(tmp_path):
    # As with megatron-core from a wheel and megatron.training from a checkout: the first regular package
    # wins.
    write(tmp_path / "checkout", {"megatron/training/arguments.py": "def parse_args(): ...\n"})
    write(tmp_path / "site", {"megatron/core/__init__.py": "", "megatron/core/a.py": "def f(): ...\n"})
    write(tmp_path / "late", {"megatron/core/__init__.py": "", "megatron/core/b.py": "def g(): ...\n"})
    tree = SourceTree([str(tmp_path / name) for name in ("checkout", "site", "late")])
    check = Checker(tree)
    assert check.inspect(patch("megatron.training.arguments:parse_args")).exists
    assert check.inspect(patch("megatron.core.a:f")).exists
    assert check.inspect(patch("megatron.core.b:g")).exists is False


def test_a_tree_of_a_package_that_is_installed_too_stays_its_own(tmp_path, monkeypatch):
    # Python searches a namespace package's path again after finders drop their caches, so two trees can mix.
    for folder, parameter in (("installed", "new"), ("older", "old")):
        write(tmp_path / folder, {"megatron/core/a.py": f"def f({parameter}): ...\n"})
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    tree = SourceTree.folder(tmp_path / "older")
    assert tree.holds("megatron.core")
    SourceTree.folder(tmp_path / "installed")
    facts = Checker(tree, "0.16.0").inspect(patch("megatron.core.a:f"))
    assert facts.params == ("old",)


def test_installed_packages_are_found_but_not_imported(tmp_path, monkeypatch):
    name = "drift_installed_package"
    files = {f"{name}/__init__.py": "raise RuntimeError\n", f"{name}/sub/deep/x.py": "def f(a): ...\n"}
    monkeypatch.syspath_prepend(str(write(tmp_path, files)))
    facts = Checker(SourceTree()).inspect(patch(f"{name}.sub.deep.x:f"))
    assert facts.params == ("a",)
    assert not [loaded for loaded in sys.modules if loaded.startswith(name)]


def test_agrees_with_the_import_system(tmp_path, monkeypatch):
    """Each target, when imported, is an object with the parameters that were read from its source."""
    import inspect

    files = {name.replace("megatron", "drift_real"): text for name, text in PACKAGE.items()}
    files = {name: text.replace("megatron.core", "drift_real.core") for name, text in files.items()}
    monkeypatch.syspath_prepend(str(write(tmp_path, files)))
    invalidate_caches()
    check = Checker(SourceTree(), root="drift_real")
    compared = 0
    for target, params, _ in FOUND:
        module, _, path = f"drift_real.core.{target}".partition(":")
        imported = import_module(module)
        for part in path.split("."):
            imported = vars(imported).get(part, getattr(imported, part, None))
        # Unwraps static and class methods.
        imported = getattr(imported, "__func__", imported)
        if params is None or not inspect.isfunction(imported) or target.endswith("either"):
            continue
        real = inspect.signature(imported).parameters.values()
        named = [p.name for p in real if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        assert check.inspect(patch(f"{module}:{path}")).params == tuple(named), target
        compared += 1
    # Most of the rows above are functions.
    assert compared > 12
    # Another test may use the same names for other files.
    for loaded in [name for name in sys.modules if name.startswith("drift_real")]:
        del sys.modules[loaded]
