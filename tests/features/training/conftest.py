from __future__ import annotations

import sys

import pytest

import mindspeed_dsa
from mindspeed_dsa import features
from tests.features.training import loop


@pytest.fixture
def megatron(tmp_path, monkeypatch, request):
    """The root package of a fork with a training loop."""
    root = loop.write(tmp_path, getattr(request, "param", "0.16"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MINDSPEED_DSA_MEGATRON_ROOT", root)
    # The fork is too small for the platform's own redirections and for DSA.
    declared = ("training.metrics", "training.initial_weights", "training.arguments", "training.verify")
    monkeypatch.setattr(features, "_DECLARATIONS", declared)
    yield root
    mindspeed_dsa.disable()
    for name in [name for name in sys.modules if name.partition(".")[0] == root]:
        del sys.modules[name]
