"""A small in-house fork of Megatron on disk, with the parts of Megatron-LM that the session touches."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import mindspeed_dsa
from mindspeed_dsa import Feature, Flag, Patch, features

FILES = {
    "core/package_info.py": 'MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ""\n',
    "core/layers.py": """
        def scale(x, factor=2):
            return x * factor


        class Linear:
            def forward(self, x):
                return scale(x)
        """,
    "core/consumer.py": """
        from {root}.core.layers import scale as rescale


        def use(x):
            return rescale(x)
        """,
    "core/models/common/language_module/language_module.py": """
        class LanguageModule:
            def __init__(self, config=None):
                self.config = config
        """,
    "training/arguments.py": """
        import argparse


        def parse_args(extra_args_provider=None, ignore_unknown_args=False):
            parser = argparse.ArgumentParser(description="fork", allow_abbrev=False)
            parser.add_argument("--num-layers", type=int, default=2)
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            if ignore_unknown_args:
                return parser.parse_known_args()[0]
            return parser.parse_args()


        def validate_args(args, defaults={{}}):
            args.derived = args.num_layers * 2
            return args
        """,
    "training/initialize.py": """
        from {root}.training.arguments import parse_args, validate_args


        def initialize(extra_args_provider=None):
            args = parse_args(extra_args_provider)
            validate_args(args)
            return args
        """,
}

IMPLEMENTATION = """
    CALLS = []


    def count(original):
        def scale(*args, **kwargs):
            CALLS.append(args)
            return original(*args, **kwargs)

        return scale


    def tenfold(x, factor=2):
        return 10 * x
    """


def write_training(folder: Path) -> None:
    """Write only ``megatron.training``, to be used with an installed ``megatron.core``.

    ``megatron`` is then a namespace package, as with a Megatron-LM checkout on the path.
    """
    write(folder, "megatron", [name for name in FILES if name.startswith("training/")])
    (folder / "megatron" / "__init__.py").unlink()


def write(folder: Path, root: str = "corp_megatron", names: Sequence[str] = tuple(FILES)) -> str:
    """Write the fork and ``<root>_impl.py``, the implementation of the tests' features."""
    for name in names:
        path = folder / root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(FILES[name]).format(root=root), encoding="utf-8")
        for parent in path.parents:
            if parent == folder:
                break
            (parent / "__init__.py").touch()
    (folder / f"{root}_impl.py").write_text(textwrap.dedent(IMPLEMENTATION), encoding="utf-8")
    return root


@contextlib.contextmanager
def features_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write the fork, and make it the root package of sessions.

    Yields:
        A function that registers a feature on ``core.layers:scale``; features and modules are removed at the
        end.
    """
    root = write(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("MINDSPEED_DSA_MEGATRON_ROOT", root)
    # The fork is too small for the platform's own redirections and for DSA.
    monkeypatch.setattr(features, "built_in", lambda: ())
    registered = []

    def register(name: str = "counting", impl: str = "count", kind: str = "wrap", **kwargs) -> None:
        feature = Feature(
            name=name,
            summary="a test feature",
            flags=kwargs.pop("flags", (Flag(f"--use-{name}", "switch"),)),
            patches=(Patch("megatron.core.layers:scale", kind, f"{root}_impl:{impl}", "test"),),
            **kwargs,
        )
        registered.append(mindspeed_dsa.register(feature))

    yield register
    mindspeed_dsa.disable()
    for feature in registered:
        mindspeed_dsa.unregister(feature.name)
    for name in [name for name in sys.modules if name.partition(".")[0] in (root, f"{root}_impl")]:
        del sys.modules[name]
