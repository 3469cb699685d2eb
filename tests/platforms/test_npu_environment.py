"""``doctor``'s report on the environment variables of an NPU."""

from __future__ import annotations

import pytest

from mindspeed_dsa.platforms.npu import VARIABLES, environment

NAMES = {each.name for each in VARIABLES}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TASK_QUEUE_ENABLE", "2", "2"),
        ("TASK_QUEUE_ENABLE", "1", "1; 2 is recommended: the host runs ahead"),
        ("TASK_QUEUE_ENABLE", None, "not set; 2 is recommended: the host runs ahead"),
        ("CPU_AFFINITY_CONF", "2,force:1", "2,force:1"),
        ("CPU_AFFINITY_CONF", "0", "0; 1 is recommended"),
        ("STREAMS_PER_DEVICE", "8", "8; 32 is recommended"),
        (
            "PYTORCH_NPU_ALLOC_CONF",
            "expandable_segments:True,pinned_max_round_threshold_mb:128",
            "expandable_segments:True,pinned_max_round_threshold_mb:128",
        ),
        (
            "PYTORCH_NPU_ALLOC_CONF",
            "max_split_size_mb:64",
            "max_split_size_mb:64; expandable_segments:True is",
        ),
        ("HCCL_CONNECT_TIMEOUT", "1200", "1200"),
        ("HCCL_CONNECT_TIMEOUT", "120", "120; 3600 is recommended"),
        ("HCCL_EXEC_TIMEOUT", None, "not set; 3600 is recommended: a rank that alone writes a checkpoint"),
        ("HCCL_EXEC_TIMEOUT", "0", "0"),
        ("HCCL_EXEC_TIMEOUT", "600", "600; 3600 is recommended"),
        ("TORCH_HCCL_ZERO_COPY", None, "not set"),
        ("TORCH_HCCL_ZERO_COPY", "1", "1"),
        ("TORCH_HCCL_ZERO_COPY", "true", "true; leave it out: the manual calls it experimental"),
        ("HCCL_OP_EXPANSION_MODE", None, "not set"),
        ("HCCL_OP_EXPANSION_MODE", "AI_CPU", "AI_CPU"),
        ("HCCL_OP_EXPANSION_MODE", "AIV", "AIV; leave it out: the manual allows AIV for inference"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "1"),
    ],
)
def test_a_value_is_shown_with_what_to_set_in_its_place(monkeypatch, name, value, said):
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    shown = environment()
    assert shown.keys() == NAMES
    assert shown[name].startswith(said)
    assert (";" in shown[name]) == (";" in said)
