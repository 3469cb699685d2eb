"""Checksums made while Megatron's own writer writes are those of the files, which nobody reads for them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mindspeed_dsa
from mindspeed_dsa import log
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.checkpoints.whole.feature import Options
from mindspeed_dsa.features.checkpoints.whole.saving import begin, finish
from mindspeed_dsa.features.checkpoints.whole.work import Work
from mindspeed_dsa.features.checkpoints.whole.written import leave, left, sum_a_file, sum_an_item
from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.manifest import Entry, Summing
from mindspeed_dsa.runs.whole_checkpoints import state_of
from tests.support import third_party

third_party.or_skip("megatron.core")


@pytest.fixture
def megatron() -> Iterator[Megatron]:
    """Megatron in one process."""
    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        found = Megatron()
        found("core.parallel_state").initialize_model_parallel()
        try:
            yield found
        finally:
            found("core.parallel_state").destroy_model_parallel()
            dist.destroy_process_group()


@pytest.mark.full
def test_a_save_is_not_read_again(
    megatron: Megatron, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(verify=True, save=tmp_path)
    context = Context("whole-checkpoints", options, megatron, log.get("whole-checkpoints"))
    work = context.state(Work)
    writer: Any = megatron("core.dist_checkpointing.strategies.filesystem_async")
    mapping: Any = megatron("core.dist_checkpointing.mapping")
    state = {
        key: mapping.ShardedTensor.from_rank_offsets(key, torch.randn(100_000)) for key in ("a", "b", "c")
    }
    work.saving = save = begin(tmp_path, "iter_0000001", work)
    save.path.mkdir()
    one_file = sum_a_file(writer.FileSystemWriterAsync.write_preloaded_data, context)
    item = functools.wraps(writer._write_item)(sum_an_item(writer._write_item, context))
    with (
        mock.patch.object(writer.FileSystemWriterAsync, "write_preloaded_data", staticmethod(one_file)),
        mock.patch.object(writer, "_write_item", item),
    ):
        megatron("core.dist_checkpointing").save(state, str(save.path))
    shards = {path.name: path for path in save.path.glob("__*.distcp")}
    assert left(save.path, save.token) == {
        name: Entry(path.stat().st_size, zlib.crc32(path.read_bytes())) for name, path in shards.items()
    }
    assert left(save.path, "another save") == {}

    read: list[str] = []
    sums = manifest.sums

    def remember(checkpoint: Path, files: list[str]) -> dict[str, Entry]:
        read.extend(files)
        return sums(checkpoint, files)

    save.tracker.write_text("1")
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "sums", remember)
        finish(save, work)
    assert read
    assert not set(read) & set(shards)
    assert state_of(tmp_path, 1, contents=True).damage == ""
    assert not list(save.path.glob(f"{manifest.SUMS}*"))


def test_a_file_that_was_not_summed_to_its_end_has_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "__0_0.distcp"
    with open(path, "wb") as file:
        stream = Summing(file)
        assert stream.write(memoryview(torch.arange(300_000).numpy())) == 2_400_000
        assert stream.tell() == 2_400_000
        whole = stream.entry
        file.write(b"behind its back")
    leave(path, whole, "token")
    assert left(tmp_path, "token") == {}
    path.write_bytes(path.read_bytes()[: whole.size])
    leave(path, whole, "token")
    assert left(tmp_path, "token") == {path.name: whole} == manifest_of(path)


def manifest_of(path: Path) -> dict[str, Entry]:
    return manifest.sums(path.parent, [path.name])
