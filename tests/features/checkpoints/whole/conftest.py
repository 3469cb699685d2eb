"""Large files of a few kilobytes, and disks that need not be waited for."""

from __future__ import annotations

import os

import pytest

from mindspeed_dsa.runs import manifest


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "SMALL", 1000)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
