"""``doctor --device``: answers and end of its training process, and one real run on the CPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.tools.cli import doctor_device
from mindspeed_dsa.tools.trial import device

BEGUN = '{"begins": "bf16: 2 steps"}'
GOOD = '{"stage": "fp32: 2 steps", "seconds": 1.5, "operators": ["lightning_indexer npu"]}'
BAD = (
    '{"stage": "bf16: 2 steps", "error": "TypeError: torch.npu.BFloat16Tensor (optimizer/optimizer.py:695)"}'
)


@pytest.fixture
def process(monkeypatch):
    """Replace the training process by a program that prints lines."""

    def let(*lines, then=""):
        said = "\n".join(f"print({line!r}, flush=True)" for line in lines)
        monkeypatch.setattr(
            doctor_device, "_COMMAND", (sys.executable, "-c", f"import sys, time\n{said}\n{then}")
        )

    return let


def test_a_failure_is_one_line_and_the_exit_status(process, capsys):
    process(GOOD, BEGUN, BAD)
    assert main(["doctor", "--device"]) == 1
    printed = capsys.readouterr().out
    assert "  fp32: 2 steps: 1.5 s on lightning_indexer npu\n" in printed
    assert (
        "  FAILED: bf16: 2 steps: TypeError: torch.npu.BFloat16Tensor (optimizer/optimizer.py:695)\n"
        in printed
    )
    assert "no problems found" not in printed
    assert main(["doctor", "--device", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["device"]
    assert [each["stage"] for each in found] == ["fp32: 2 steps", "bf16: 2 steps"]
    process(GOOD)
    assert main(["doctor", "--device"]) == 0
    assert capsys.readouterr().out.startswith("no problems found\n")


def test_a_process_that_ends_is_named_with_its_last_words(process):
    process(BEGUN, then="sys.exit('no HCCL')")
    assert doctor_device.examine("npu") == [
        {"stage": "bf16: 2 steps", "error": "the process ended with 1: no HCCL"}
    ]
    process(then="raise SystemExit(3)")
    assert doctor_device.examine("npu") == [
        {"stage": "start", "error": "the process ended with 3: it said nothing"}
    ]


def test_a_device_that_does_not_answer_is_given_up(process, monkeypatch):
    monkeypatch.setattr(doctor_device, "LIMIT", 1.0)
    process(GOOD, BEGUN, then="time.sleep(60)")
    found = doctor_device.examine("npu")
    assert found[-1] == {"stage": "bf16: 2 steps", "error": "it did not end within 1 s"}
    assert len(found) == 2


def test_the_platform_is_handed_on(process):
    process(then='print(\'{"stage": "\' + sys.argv[1] + \'", "seconds": 1}\')')
    assert doctor_device.examine("cuda") == [{"stage": "cuda", "seconds": 1}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_nothing_trains_where_no_platform_was_found(process, capsys):
    process(GOOD)
    assert main(["doctor", "--device", "--mindspeed-platform", "cuda"]) == 1
    printed = capsys.readouterr().out
    assert "  FAILED: start: there is no platform to train on\n" in printed
    assert printed.count("FAILED") == 1
    assert "platform cuda was asked for" in printed


def test_an_error_has_its_innermost_place():
    try:
        device.stages(device.CASES[0], None).__next__()[1].__globals__["fill"](torch.nn.Linear(2, 2).half)
    except AttributeError as error:
        said = device.said(error)
    assert said.startswith("AttributeError: ")
    assert said.endswith(")")
    assert "(trial/side.py:" in said
    assert "\n" not in device.said(ValueError("two\nlines"))


@pytest.mark.full
def test_the_cpu_trains_saves_and_resumes():
    stages = doctor_device.examine("cpu")
    assert [stage["stage"] for stage in stages] == [
        "fp32: 2 steps",
        "bf16: 2 steps",
        "bf16 with --use-fused-dsa: 2 steps",
        "bf16 with --use-fused-dsa: save",
        "bf16 with --use-fused-dsa: resume",
    ]
    assert not [stage for stage in stages if "error" in stage]
    assert "lightning_indexer cpu" in stages[2]["operators"]
