"""Fake large files, disks that need no waiting, and a training loop that saves."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mindspeed_dsa
from mindspeed_dsa import features
from mindspeed_dsa.features.checkpoints.whole.feature import FEATURE
from tests.features.checkpoints.whole.folders import SHARD
from tests.support import fork

FILES = {
    "training/__init__.py": """
        from types import SimpleNamespace

        ARGS = SimpleNamespace(
            save=None, async_save=False, ckpt_step=None, non_persistent_ckpt_type=None,
            non_persistent_global_ckpt_dir=None, save_retain_interval=None, ckpt_format="torch_dist",
        )


        def get_args():
            return ARGS
        """,
    "training/async_utils.py": """
        QUEUE = []


        def schedule_async_save(async_request):
            QUEUE.append(async_request)


        def finalize():
            request = QUEUE.pop(0)
            if request.async_fn is not None:
                request.async_fn(*request.async_fn_args)
            for function in request.finalize_fns:
                function()


        def maybe_finalize_async_save(blocking=False):
            while blocking and QUEUE:
                finalize()
        """,
    "training/checkpointing.py": """
        import os
        import shutil
        from typing import Callable, NamedTuple

        from {root}.training import get_args
        from {root}.training.async_utils import schedule_async_save

        SEEN = []


        class Request(NamedTuple):
            async_fn: Callable
            async_fn_args: tuple
            finalize_fns: list

            def add_finalize_fn(self, function):
                self.finalize_fns.append(function)


        def get_checkpoint_tracker_filename(checkpoints_path):
            return os.path.join(checkpoints_path, "latest_checkpointed_iteration.txt")


        def write_shard(path, content):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)


        def write_shards(folder, content):
            for number in range(2):
                torch_dist = f"{{folder}}/__0_{{number}}.distcp"
                torch = f"{{folder}}/mp_rank_{{number:02d}}/model_optim_rng.pt"
                write_shard(torch if get_args().ckpt_format == "torch" else torch_dist, content)


        def save_checkpoint(iteration, model, non_persistent_ckpt=False, release=False):
            args = get_args()
            save_dir = os.path.join(args.save, "non_persistent") if non_persistent_ckpt else args.save
            folder = os.path.join(save_dir, "release" if release else f"iter_{{iteration:07d}}")
            os.makedirs(folder, exist_ok=True)
            finalize_fns = []
            if args.ckpt_format == "torch_dist":
                with open(f"{{folder}}/common.pt", "w") as file:
                    file.write(str(iteration))
                finalize_fns.append(lambda: open(f"{{folder}}/metadata.json", "w").write("1"))
            request = Request(write_shards, (folder, model), finalize_fns)
            tracker_filename = get_checkpoint_tracker_filename(save_dir)

            def end():
                before = open(tracker_filename).read() if os.path.exists(tracker_filename) else ""
                SEEN.append(before)
                with open(tracker_filename, "w") as file:
                    file.write("release" if release else str(iteration))
                if args.save_retain_interval and before and int(before) % args.save_retain_interval:
                    shutil.rmtree(f"{{save_dir}}/iter_{{int(before):07d}}")

            request.add_finalize_fn(end)
            if args.async_save:
                schedule_async_save(request)
                return
            request.async_fn(*request.async_fn_args)
            for function in finalize_fns:
                function()


        def read_metadata(tracker_filename):
            with open(tracker_filename) as file:
                text = file.read()
            return (0, True) if text == "release" else (int(text), False)


        def _get_non_persistent_iteration(folder, args, checkpointing_context=None):
            if args.non_persistent_ckpt_type is None:
                return -1
            iteration, _ = read_metadata(get_checkpoint_tracker_filename(folder))
            return iteration


        def _load_base_checkpoint(load_dir, args, rank0=False, sharded_state_dict=None):
            newest = _get_non_persistent_iteration(os.path.join(load_dir, "non_persistent"), args)
            iteration, release = -1, False
            tracker_filename = get_checkpoint_tracker_filename(load_dir)
            if os.path.isfile(tracker_filename):
                iteration, release = read_metadata(tracker_filename)
            if args.ckpt_step:
                iteration = args.ckpt_step
            if newest > iteration:
                return f"non_persistent/iter_{{newest:07d}}"
            if iteration == -1:
                return None
            return "release" if release else f"iter_{{iteration:07d}}"


        def load_checkpoint(load_dir):
            args = get_args()
            first = _load_base_checkpoint(load_dir, args, rank0=True)
            second = _load_base_checkpoint(load_dir, args, sharded_state_dict=1)
            assert first == second
            return second
        """,
}
ROOT = "megatron_that_saves"


class Job(SimpleNamespace):
    """Modules of the Megatron fork, and its checkpoint folder."""

    def save(self, iteration: int, content: bytes = b"", **kwargs: Any) -> None:
        self.checkpointing.save_checkpoint(iteration, content or os.urandom(SHARD), **kwargs)

    def load(self) -> Any:
        return self.checkpointing.load_checkpoint(str(self.folder))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A fork with ``whole_checkpoints`` on."""
    with _job(tmp_path, monkeypatch, whole_checkpoints=True) as made:
        yield made


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A fork with ``verify_checkpoint`` on, which makes checksums."""
    with _job(tmp_path, monkeypatch, verify_checkpoint=True) as made:
        yield made


@contextmanager
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **switches: Any) -> Iterator[Job]:
    fork.write(tmp_path, ROOT)
    for name, text in FILES.items():
        path = tmp_path / ROOT / name
        path.write_text(textwrap.dedent(text).format(root=ROOT), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MINDSPEED_DSA_MEGATRON_ROOT", ROOT)
    # The fork is too small for the platform's redirections, so only this feature is built in.
    monkeypatch.setattr(features, "built_in", lambda: (FEATURE,))
    folder = tmp_path / "checkpoints"
    with mindspeed_dsa.enabled(**switches):
        training = import_module(f"{ROOT}.training")
        training.ARGS.save = str(folder)
        yield Job(
            args=training.ARGS,
            checkpointing=import_module(f"{ROOT}.training.checkpointing"),
            async_utils=import_module(f"{ROOT}.training.async_utils"),
            folder=folder,
        )
    for name in [name for name in sys.modules if name.split(".")[0] == ROOT]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
