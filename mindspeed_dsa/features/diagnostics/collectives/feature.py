"""``--record-collectives``: record collectives, to find the cause when a job hangs or loses a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.megatron import pipeline_steps
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch

SILENCE_S = 120.0
"""Default seconds without a collective before records are written; a group's default timeout is 600 s."""

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "reduce", "gather", "scatter"),
    *("all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "gather_object"),
    *("scatter_object_list", "barrier", "monitored_barrier"),
)
"""Collective functions of ``torch.distributed``, called by all ranks of a group."""
MESSAGES = ("send", "recv", "isend", "irecv")
"""Point-to-point functions of ``torch.distributed``."""


@dataclass(frozen=True)
class Options:
    """Options of ``--record-collectives``.

    Attributes:
        folder: folder of the records.
        silence_s: seconds without a collective after which records are written.
    """

    folder: Path
    silence_s: float

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings.

        Raises:
            SettingsError: ``--record-collectives-after`` is given without ``--record-collectives``.
        """
        folder, silence_s = settings.record_collectives, settings.record_collectives_after
        if folder is None:
            raise SettingsError(
                f"--record-collectives-after {silence_s} records nothing without --record-collectives; "
                "name a folder with that, or omit it"
            )
        return cls(Path(folder), SILENCE_S if silence_s is None else silence_s)


def recording_wanted(settings: Any) -> bool:
    """Return whether either flag is set; :meth:`Options.of` rejects the time without a folder."""
    return settings.record_collectives is not None or settings.record_collectives_after is not None


def check_recording(args: Any, options: Any) -> Iterator[str]:
    """Yield problems with the folder and the time."""
    silence_s, folder = Options.of(args).silence_s, Path(args.record_collectives)
    if silence_s < 1:
        yield f"--record-collectives-after {silence_s}: use at least 1 second"
    if folder.exists() and not folder.is_dir():
        yield f"--record-collectives {folder} is a file; name a folder"
    # The folder may not exist yet: check the nearest existing parent.
    nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if nearest.is_dir() and not os.access(nearest, os.W_OK):
        yield f"--record-collectives {folder}: {nearest} cannot be written to; name another folder"
    yield from refuse_graphs(args, "--record-collectives", "collectives of a replay pass no Python")
    # The timeout of a group kills the process, and nothing would be written.
    for name, factor in (("distributed_timeout_minutes", 60), ("distributed_timeout_seconds_after_init", 1)):
        value = getattr(args, name, None)
        if value and silence_s >= factor * value:
            yield (
                f"--record-collectives-after {silence_s:g}: the groups' own time-out ends the job first "
                f"(--{name.replace('_', '-')} {value}); use less than {factor * value:g} seconds"
            )


_C10D = "torch.distributed.distributed_c10d"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_RECORDER = "mindspeed_dsa.features.diagnostics.collectives.recorder"
_PLACES = "mindspeed_dsa.features.diagnostics.collectives.places"

FEATURE = Feature(
    name="record-collectives",
    summary="Records collectives, and writes what every rank waits for when a job hangs or loses a rank.",
    flags=(
        Flag(
            "--record-collectives",
            "Write the last collectives of each process group to DIR. Also write a rank's Python stacks if "
            "no collective starts or ends for a while, on SIGUSR1, and if the rank fails or is ended. "
            "`python -m mindspeed_dsa hang DIR` reads the files.",
            kind="value",
            metavar="DIR",
        ),
        Flag(
            "--record-collectives-after",
            "Write Python stacks if no collective has started or ended for so many seconds; default: 120.",
            kind="value",
            type=float,
            metavar="SECONDS",
        ),
    ),
    patches=(
        *(
            Patch(
                f"{_C10D}:{name}",
                "wrap",
                f"{_RECORDER}:record_collective",
                "records who has started which collective of a group",
                params=("group",),
                required=False,
                stale="report",
            )
            for name in COLLECTIVES
        ),
        *(
            Patch(
                f"{_C10D}:{name}",
                "wrap",
                f"{_RECORDER}:record_message",
                "records messages of two ranks, which torch's own recorder does not for gloo",
                params=("tensor", "group", "tag"),
                stale="report",
            )
            for name in MESSAGES
        ),
        Patch(
            f"{_C10D}:destroy_process_group",
            "wrap",
            f"{_RECORDER}:stop_recording",
            "a rank that leaves its groups in order removes its files",
            params=("group",),
            stale="report",
        ),
        *pipeline_steps.rows(
            f"{_PLACES}:Passes",
            "says where a step of the schedule begins and ends",
            "names the microbatch",
            "names the microbatch of a backward",
            "names both microbatches of a pair",
        ),
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_PLACES}:name_layer",
            "names the layer that collectives belong to, in forward and in backward",
            priority=100,
        ),
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            "wrap",
            f"{_PLACES}:name_pieces",
            "names the layer where a schedule takes it apart",
        ),
        Patch(
            f"{_DISPATCHER}.token_dispatch",
            "wrap",
            f"{_PLACES}:name_dispatch",
            "names Megatron's own all-to-all of tokens",
            versions=">=0.13",
        ),
        Patch(
            f"{_DISPATCHER}.token_combine",
            "wrap",
            f"{_PLACES}:name_combine",
            "names Megatron's own all-to-all of the experts' outputs",
            versions=">=0.13",
        ),
    ),
    active=recording_wanted,
    options=Options.of,
    check=check_recording,
    doc="record-collectives.md",
)
