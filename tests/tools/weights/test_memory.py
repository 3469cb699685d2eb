"""Memory of imports and exports is bounded by the largest tensor, for files of any size."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import warm
from tests.tools.weights import models

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")

ROOT = Path(__file__).parents[3]
EXPERTS, WIDTH = 128, 1024
PROGRAM = """
import resource, sys, threading
from pathlib import Path
from mindspeed_dsa.__main__ import main
from mindspeed_dsa.tools.weights import importing, model
from megatron.core.models.gpt import GPTModel  # its code is no part of what is measured

def resident():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

end, peak, begin = threading.Event(), 0, resident()
def watch():
    global peak
    while not end.wait(0.005):
        peak = max(peak, resident() - begin)
watcher = threading.Thread(target=watch)
watcher.start()
status = main(["weights", *sys.argv[1:]])
end.set()
watcher.join()
print(peak)
sys.exit(status)
"""


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[Path]:
    """Yield a model of 1.6 GB whose weights are a hole in a file, which takes no disk space."""
    model = models.write("deepseek_v3", tmp_path / "model", num_hidden_layers=2)
    from transformers import AutoConfig

    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_size": WIDTH, "moe_intermediate_size": WIDTH * 2, "n_routed_experts": EXPERTS}
    (model / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(model).n_routed_experts == EXPERTS
    file = model / models.FILE
    length = int.from_bytes(file.read_bytes()[:8], "little")
    small_header = json.loads(file.read_bytes()[8 : 8 + length])
    header, offset = {}, 0
    for name, entry in _tensors(small_header):
        bytes_ = (4 if entry["dtype"] == "F32" else 2) * _count(entry["shape"])
        header[name] = {**entry, "data_offsets": [offset, offset + bytes_]}
        offset += bytes_
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + offset)
    yield model
    shutil.rmtree(tmp_path)


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _tensors(known: dict[str, dict[str, object]]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the tensors of a small model with the width and the experts of the large one."""
    for name, entry in known.items():
        if name == "__metadata__":
            continue
        widths = {160: WIDTH, 48: WIDTH * 2, 4: EXPERTS}
        sizes = entry["shape"]
        assert isinstance(sizes, list)
        shape = [widths.get(size, size) for size in sizes]
        for expert in range(EXPERTS) if ".experts.0." in name else [0]:
            if ".experts." in name and ".experts.0." not in name:
                break
            yield name.replace(".experts.0.", f".experts.{expert}."), {**entry, "shape": shape}


@pytest.mark.full
def test_an_import_and_an_export_hold_few_tensors(sparse: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    largest = 2 * 2 * WIDTH * WIDTH * 2  # bytes of an expert's gate and value, one tensor in Megatron
    size = (sparse / models.FILE).stat().st_size
    assert size > 1.5e9
    for words in (
        ("check", sparse),
        ("import", sparse, tmp_path / "checkpoints"),
        ("export", tmp_path / "checkpoints", tmp_path / "out", "--like", sparse),
    ):
        command = [sys.executable, str(tmp_path / "program.py"), *map(str, words)]
        ended = warm.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
        assert ended.returncode == 0, ended.stderr
        # Megatron's imports and a model without weights take 150 MB in addition to the tensors.
        assert int(ended.stdout.split()[-1]) < 150e6 + 3 * largest < size / 6
        if words[0] == "import":
            assert (tmp_path / "checkpoints" / "release").exists()
