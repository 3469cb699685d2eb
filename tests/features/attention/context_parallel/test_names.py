"""Arguments get Megatron's names of algorithms, and each layer gets its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mindspeed_dsa
from tests.support import model as job

CASES = "tests.features.attention.context_parallel.test_names"


@pytest.mark.parametrize(
    ("given", "comm_type", "sizes"),
    [
        ({"context_parallel_algo": "ulysses_cp_algo"}, ["a2a"], None),
        ({"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2}, ["a2a+p2p"], [2, 2]),
    ],
)
def test_megatron_finds_its_own_names(given, comm_type, sizes):
    args = SimpleNamespace(
        context_parallel_size=4, cp_comm_type=["p2p"], hierarchical_context_parallel_sizes=None, **given
    )
    with mindspeed_dsa.enabled(context_parallel_size=4, **given):
        mindspeed_dsa.validate(args)
    assert args.cp_comm_type == comm_type
    assert args.hierarchical_context_parallel_sizes == sizes


def test_everything_wrong_is_one_error():
    args = SimpleNamespace(context_parallel_size=4, seq_length=30, ulysses_degree_in_cp=2)
    with (
        mindspeed_dsa.enabled(context_parallel_size=4, ulysses_degree_in_cp=2),
        pytest.raises(mindspeed_dsa.SettingsError) as refusal,
    ):
        mindspeed_dsa.validate(args)
    assert "multiple of 8" in str(refusal.value)
    assert "belongs to hybrid_cp_algo" in str(refusal.value)


def test_every_layer_gets_its_own_name(pool):
    names = ["p2p", "a2a", "allgather"]
    arguments = {"names": names, "experimental_attention_variant": "none"}
    (told,) = pool.run(f"{CASES}:names_of_layers", 1, context_parallel_size=2, **arguments)
    assert told == names
    error = pool.run("tests.support.model:error_of", 1, case=f"{CASES}:names_of_layers", **arguments)[0]
    assert "IndexError" in error, "Megatron's own reading"


class _Recorder(torch.nn.Module):
    """Attention module that records the ``cp_comm_type`` it is built with."""

    told: list[str] = []  # noqa: RUF012

    def __init__(self, cp_comm_type: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.told.append(cp_comm_type)


def names_of_layers(names: list[str], **switches: Any) -> list[str]:
    """Return the ``cp_comm_type`` that each of Megatron's layers passes to its attention."""
    job.start(switches)
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    cfg = job.config(num_layers=len(names), **job.WITHOUT_EXPERTS)
    cfg.context_parallel_size, cfg.cp_comm_type = 2, names
    submodules = TransformerLayerSubmodules(self_attention=ModuleSpec(module=_Recorder))
    _Recorder.told.clear()
    for number in range(1, len(names) + 1):
        TransformerLayer(cfg, submodules, layer_number=number)
    assert cfg.cp_comm_type == names
    assert type(cfg.cp_comm_type) is list
    return list(_Recorder.told)
