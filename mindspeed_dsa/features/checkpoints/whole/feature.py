"""Declaration of whole-checkpoints: saves add a manifest, and loads use the newest complete checkpoint.

tests: tests/features/checkpoints/whole
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches.spec import Patch

FLAG = "--whole-checkpoints"
VERIFY = "--verify-checkpoint"
_HERE = "mindspeed_dsa.features.checkpoints.whole"
_CHECKPOINTING = "megatron.training.checkpointing"
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


@dataclass(frozen=True)
class Options:
    """Options of ``--whole-checkpoints`` and ``--verify-checkpoint``.

    Attributes:
        verify: whether to checksum a checkpoint's files after saving, and compare them before loading.
        save: folder that the job saves to; ``None`` if it does not save.
    """

    verify: bool
    save: Path | None

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build the options from resolved settings."""
        save = getattr(settings, "save", None)
        return cls(bool(settings.verify_checkpoint), Path(save) if save else None)


def active(settings: Any) -> bool:
    """Return whether either switch is on."""
    return bool(settings.whole_checkpoints or settings.verify_checkpoint)


def check_saves(args: Any, options: Options) -> Iterator[str]:
    """Yield errors for URLs in ``--save`` or ``--load``, and formats that ``--async-save`` cannot save."""
    written = argument(args, "ckpt_format")
    # Releases with `async_strategy` save all Megatron formats except `torch` asynchronously.
    served = (
        ("torch_dist", "torch_dcp", "fsdp_dtensor") if hasattr(args, "async_strategy") else ("torch_dist",)
    )
    if argument(args, "async_save") and written and written not in served:
        yield (
            f"--async-save: Megatron-LM saves --ckpt-format {written} synchronously only, and would end the "
            "job at its first save; take --ckpt-format torch_dist, or omit --async-save"
        )
    for name in ("save", "load"):
        folder = argument(args, name)
        if folder and "://" in str(folder):
            yield (
                f"{FLAG}: --{name} {folder} is no folder of a file system, whose files have sizes and names "
                "that can be changed in one step; name one, or omit the flag"
            )


FEATURE = Feature(
    name="whole-checkpoints",
    summary="Lists each checkpoint's files with sizes, and loads the newest that is whole.",
    flags=(
        Flag(
            FLAG,
            "Write a manifest of each checkpoint's files, last, and load the newest checkpoint whose files "
            "have the sizes that its manifest says.",
        ),
        Flag(
            VERIFY,
            "Make a checksum of each file when a checkpoint was saved, and compare it before one is loaded.",
        ),
        Flag("--save", "Megatron's own flag; no second job may save there.", kind="value", megatron=True),
    ),
    patches=(
        Patch(
            f"{_CHECKPOINTING}:save_checkpoint",
            "wrap",
            f"{_HERE}.saving:save_whole",
            "writes the manifest of a checkpoint when all of its files are written, and lets the tracker "
            "name it then",
            params=("iteration",),
            required=False,
        ),
        Patch(
            f"{_CHECKPOINTING}:get_checkpoint_tracker_filename",
            "wrap",
            f"{_HERE}.saving:track_aside",
            "Megatron writes the tracker in place; what it writes while it saves is renamed to the tracker",
            params=("checkpoints_path",),
            required=False,
        ),
        Patch(
            "megatron.training.async_utils:schedule_async_save",
            "wrap",
            f"{_HERE}.saving:schedule_whole",
            "an asynchronous save ends with the manifest",
            params=("async_request",),
            required=False,
        ),
        Patch(
            f"{_WRITER}:FileSystemWriterAsync.write_preloaded_data",
            "wrap",
            f"{_HERE}.saving:end_writer",
            "a process that writes ends with its job: the next one may write the same files",
            required=False,
        ),
        Patch(
            f"{_CHECKPOINTING}:_load_base_checkpoint",
            "wrap",
            f"{_HERE}.loading:load_whole",
            "chooses the checkpoint, once for all ranks, where Megatron takes what the tracker names",
            params=("load_dir", "args"),
            required=False,
            priority=10,  # outside of features that read the checkpoint's folder
        ),
        Patch(
            f"{_CHECKPOINTING}:read_metadata",
            "wrap",
            f"{_HERE}.loading:read_chosen",
            "whoever asks which iteration a folder has learns the chosen one; a damaged tracker ends no job",
            params=("tracker_filename",),
            required=False,
        ),
        Patch(
            f"{_CHECKPOINTING}:_get_non_persistent_iteration",
            "wrap",
            f"{_HERE}.loading:pass_over_non_persistent",
            "a folder of non-persistent checkpoints without a whole one is passed over, as one without a "
            "tracker is",
            required=False,
        ),
        Patch(
            f"{_CHECKPOINTING}:load_checkpoint",
            "wrap",
            f"{_HERE}.loading:forget_choices",
            "a choice holds for one load: the next one may find other checkpoints",
            required=False,
        ),
    ),
    active=active,
    options=Options.of,
    check=check_saves,
    in_training_loop=True,
    on_finalize=f"{_HERE}.saving:lock_before_training",
    doc="whole-checkpoints.md",
)
