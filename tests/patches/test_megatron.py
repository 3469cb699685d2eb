"""The patch engine on real packages: megatron-core and torch."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import pytest

from mindspeed_dsa.patches import Claim, Patch, PatchManager
from tests.support import third_party

pytest.importorskip("torch")
third_party.or_skip("megatron.core")

IMPLEMENTATION = """
CALLS = []

def counted(original):
    def wrapper(*args, **kwargs):
        CALLS.append(original.__qualname__)
        return original(*args, **kwargs)
    return wrapper
"""
TARGETS = (
    "megatron.core.utils:divide",
    "megatron.core.models.common.embeddings.rope_utils:_rotate_half",
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    "megatron.core.transformer.mlp:MLP.forward",
    "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    "megatron.core.models.gpt.gpt_model:GPTModel.forward",
)


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """Keep the whole heap visible here, unlike in the other tests."""


def bindings():
    """Return the ids of all objects that modules and Megatron's classes bind."""
    # Ids only: a snapshot that held the objects would count as a holder of stale originals.
    ids = {}
    for name, module in tuple(sys.modules.items()):
        if not issubclass(type(module), ModuleType):
            continue
        if module.__name__.startswith("hypothesis"):  # counts garbage collections in a global
            continue
        for key, value in tuple(vars(module).items()):
            ids[name, key] = id(value)
            if issubclass(type(value), type) and str(value.__module__).startswith("megatron"):
                ids |= {(name, key, attribute): id(raw) for attribute, raw in vars(value).items()}
    return ids


@pytest.fixture
def impl(tmp_path, monkeypatch):
    (tmp_path / "counting_impl.py").write_text(IMPLEMENTATION)
    monkeypatch.syspath_prepend(tmp_path)
    import counting_impl

    yield counting_impl
    del sys.modules["counting_impl"]


def test_patch_finalize_undo(impl):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.models.gpt
        from megatron.core import tensor_parallel, utils
        from megatron.core.tensor_parallel import layers
        from megatron.core.transformer.transformer_config import TransformerConfig
    before = bindings()
    manager = PatchManager()
    rows = [Patch(target, "wrap", "counting_impl:counted", "test") for target in TARGETS]
    manager.plan(Claim("test", row) for row in rows)
    manager.check()
    try:
        manager.arm()
        manager.finalize()
        reports = manager.report()
        assert [site.state for site in reports] == ["applied"] * len(TARGETS)
        assert [site.stale for site in reports] == [[] for _ in TARGETS]
        # The consumer's own global is the patch, and its calls are counted.
        assert layers.divide is utils.divide
        assert id(utils.divide) != before["megatron.core.utils", "divide"]
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
        assert tensor_parallel.layers.divide(8, 2) == 4
        assert config.kv_channels == 4
        assert {"TransformerConfig.__post_init__", "divide"} <= set(impl.CALLS)
    finally:
        manager.undo()
    after = bindings()
    changed = [key for key in before if key not in after or after[key] != before[key]]
    assert changed == []
    assert megatron.core.models.gpt.GPTModel.forward.__code__.co_name == "forward"
