"""Waiting for the import of a fork affects no other import."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from mindspeed_dsa.session import forks


def test_the_import_that_ends_the_watch_is_seen_by_all_other_finders(monkeypatch):
    """Import hooks are finders: a skipped finder leaves a module without its patches."""
    asked = []

    class Finder:
        def find_spec(self, name, path, target=None):
            asked.append(name)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    watch = forks.Watch(lambda root: pytest.fail(f"{root} is no fork"))
    assert sys.meta_path[0] is watch
    with pytest.raises(ModuleNotFoundError):
        import a_module_that_is_not_there  # noqa: F401
    assert asked == ["a_module_that_is_not_there"]
    assert watch not in sys.meta_path
