"""Features for selections (the keys chosen by indexers): sharing between layers, recording and replay."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Conflict, Feature, Flag
from mindspeed_dsa.features.dsa.feature import USE_FUSED_DSA, refuse_packs_of_megatron
from mindspeed_dsa.features.dsa.selections.format import Header, Recording, header_in
from mindspeed_dsa.megatron import pipeline_steps
from mindspeed_dsa.megatron.configuration import argument, hybrid_flag, loaded_step
from mindspeed_dsa.megatron.dsa import DSA, KERNELS, OWN_LOOP, uses_dsa
from mindspeed_dsa.megatron.dsa import Options as Parts
from mindspeed_dsa.megatron.graphs import ATTENTION, refuse_graphs
from mindspeed_dsa.megatron.pipeline_chunks import check_chunks, who
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.runs.files import RunError, number

_HERE = "mindspeed_dsa.features.dsa.selections"
_ALL = ">=0.12.1,<0.21"


# -- sharing -------------------------------------------------------------------------------------


def check_sharing(args: Any, options: Parts) -> Iterator[str]:
    """Yield a problem if a layer would reuse a selection of another pipeline chunk, or of another graph."""
    yield from check_chunks(args)
    if Sharing.of(args).is_on:
        yield from refuse_graphs(
            args, who(Sharing.of(args)), "selections pass from layer to layer beside a graph", {ATTENTION}
        )


SHARED_SELECTIONS = Feature(
    name="dsa-shared-selections",
    summary="One indexer for several layers, on releases that lack it, and right under recomputation.",
    flags=(EXPERIMENTAL_ATTENTION_VARIANT,),
    active=uses_dsa,
    when="the model uses DSA",
    options=Parts.of,
    check=check_sharing,
    doc="dsa-shared-selections.md",
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            "wrap",
            f"{_HERE}.share:place_in_decoder",
            "layers of released cores all have an indexer, and 0.19 knows no pattern",
            params=("config",),
            versions=_ALL,
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__",
            "wrap",
            f"{_HERE}.share:place_in_mtp",
            "layers of multi-token prediction are counted apart from the decoder's",
            params=("config",),
            versions=_ALL,
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.forward",
            "wrap",
            f"{_HERE}.share:select_anew_in_mtp",
            "a layer that runs once for each predicted token selects the first time only",
            versions=_ALL,
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}.share:attend_with_megatron",
            "Megatron's DSA of these releases always selects",
            params=("query", "key", "value"),
            versions=OWN_LOOP,
        ),
        Patch(
            f"{DSA}:unfused_dsa_fn",
            "wrap",
            f"{_HERE}.share:hand_on_indices",
            "Megatron's DSA of these releases keeps its selection to itself",
            params=("query", "key", "value", "topk_indices"),
            versions=OWN_LOOP,
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}.share:repeat_with_megatron",
            "Megatron's layers select in every run or in none, repeated ones of multi-token prediction too",
            versions=KERNELS,
        ),
        Patch(
            f"{DSA}:DSAttention._get_index_share_topk_holder",
            "replace",
            f"{_HERE}.share:hold_indices",
            "Megatron keeps selections on the configuration, where a recomputed layer reads those of a later "
            "microbatch",
            versions=KERNELS,
            factory=True,
        ),
        Patch(
            f"{DSA}:DSAttention._get_index_share_topk_length_holder",
            "replace",
            f"{_HERE}.share:hold_lengths",
            "Megatron keeps the lengths of selections on the configuration as well",
            versions=KERNELS,
            factory=True,
        ),
        Patch(
            "megatron.core.tensor_parallel.random:checkpoint",
            "wrap",
            f"{_HERE}.share:carry_selection",
            "a recomputed layer runs before the one that it shares a selection with, and its weights get no "
            "gradient where its input wants none",
            params=("function", "distribute_saved_activations"),
            versions=_ALL,
            priority=200,  # outside wrappers that replace Megatron's recomputation
        ),
        Patch(
            "megatron.core.extensions.transformer_engine:te_checkpoint",
            "wrap",
            f"{_HERE}.share:carry_selection",
            "a layer recomputed by Transformer Engine runs before the one that it shares a selection with",
            versions=_ALL,
            required=False,
        ),
    ),
)


# -- recording and replaying ---------------------------------------------------------------------

RECORD, REPLAY = "--dsa-record-selections", "--dsa-replay-selections"
BATCH = "batch"
"""Value of the flag in place of a folder: selections are passed with each batch."""
REFUSE, SELECT = "refuse", "select"


class NoNumbers(argparse.ArgumentTypeError, ValueError):
    """Error for text that is not a list of numbers; argparse prints the message."""


@dataclass(frozen=True)
class Numbers:
    """Set of numbers given as ranges, for example ``1-10,20,100-:50``.

    Attributes:
        ranges: tuples of first number, last number (None: unbounded) and step.
    """

    ranges: tuple[tuple[int, int | None, int], ...]

    @classmethod
    def of(cls, text: str) -> Numbers:
        """Parse a flag's value.

        Raises:
            NoNumbers: the text is not a list of numbers or ranges.
        """
        ranges = []
        for part in text.split(","):
            span, _, step = part.partition(":")
            first, dash, last = span.partition("-")
            low, high, every = number(first), number(last), number(step or "1")
            if low is None or not every or (last and high is None) or (high is not None and high < low):
                raise NoNumbers(
                    f"{part!r} is no number or range of numbers; write 7, 1-10, 100- or 1-1000:50, and "
                    "commas between several"
                )
            ranges.append((low, high if dash else low, every))
        return cls(tuple(ranges))

    def __contains__(self, value: int) -> bool:
        return any(
            first <= value and (last is None or value <= last) and (value - first) % step == 0
            for first, last, step in self.ranges
        )


@dataclass(frozen=True)
class Options:
    """Options of recording and replay.

    Attributes:
        record: folder to record into; None: no recording.
        steps: steps to record; None: all.
        layers: layers to record; None: all.
        rows: token positions in the sequence to record; None: all.
        mass: whether to record the attention probability of each key.
        replay: folder of the recording to replay; None: selections are passed with each batch, or nothing is
            replayed.
        with_batch: whether the job passes selections with each batch.
        missing: action for a token without a selection, :data:`REFUSE` or :data:`SELECT`.
    """

    record: Path | None = None
    steps: Numbers | None = None
    layers: Numbers | None = None
    rows: Numbers | None = None
    mass: bool = False
    replay: Path | None = None
    with_batch: bool = False
    missing: str = REFUSE

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings.

        Raises:
            SettingsError: a flag is set without another flag that it requires.
        """
        record, replay = settings.dsa_record_selections, settings.dsa_replay_selections
        parts = ("steps", "layers", "rows", "mass")
        limits = {part: getattr(settings, f"dsa_record_selections_{part}") for part in parts}
        for part, value in limits.items():
            if value not in (None, False) and record is None:
                raise SettingsError(
                    f"{RECORD}-{part} records nothing without {RECORD}; name a folder with that"
                )
        if settings.dsa_replay_missing is not None and replay is None:
            raise SettingsError(
                f"--dsa-replay-missing {settings.dsa_replay_missing} is for {REPLAY}; give that as well, or "
                f"omit it"
            )
        return cls(
            record=None if record is None else Path(record),
            **limits,
            replay=None if replay in (None, BATCH) else Path(replay),
            with_batch=replay == BATCH,
            missing=settings.dsa_replay_missing or REFUSE,
        )


def wanted(settings: Any) -> bool:
    """Return whether any of the flags is set. Flags without the flag that they require are an error."""
    return any(getattr(settings, flag.dest) not in (None, False) for flag in _FLAGS)


def header_of(args: Any) -> Header:
    """Return the header of a recording for a model.

    Args:
        args: arguments of the job, or the model's configuration.
    """
    layers, mtp_layers = argument(args, "num_layers") or 0, argument(args, "mtp_num_layers") or 0
    sharing = Sharing.of(args)
    computing = [layer for layer in range(1, layers + 1) if sharing.computes(layer)]
    computing += [layers + layer for layer in range(1, mtp_layers + 1) if sharing.mtp_computes(layer)]
    return Header(argument(args, "dsa_indexer_topk") or 0, layers, mtp_layers, tuple(computing))


def check_selections(args: Any, options: Any) -> Iterator[str]:
    """Yield reasons why a job cannot record or replay selections."""
    asked, parts = Options.of(args), Parts.of(args)
    flags = " and ".join(
        flag for flag, on in ((RECORD, asked.record), (REPLAY, asked.replay or asked.with_batch)) if on
    )
    if not uses_dsa(args):
        yield (
            f"{flags}: the model selects no keys; add --experimental-attention-variant dsa, or omit the flag"
        )
        return
    if not parts.all_ours:
        yield f"{flags}: selections of Megatron's own operators stay in them; add --use-fused-dsa"
    if parts.attends_densely:
        yield (
            f"{flags}: --dsa-stage {parts.stage} attends to all keys, whatever an indexer selects; omit the "
            f"flag"
        )
    repeats = argument(args, "mtp_use_repeated_layer") and (argument(args, "mtp_num_layers") or 0) > 1
    if repeats and not argument(args, "dsa_indexer_share_for_mtp"):
        yield (
            f"{flags}: --mtp-use-repeated-layer runs one layer several times, and it selects each time; add "
            "--dsa-indexer-share-for-mtp, or omit the flag"
        )
    if argument(args, "allgather_cp") and (argument(args, "context_parallel_size") or 1) > 1:
        yield (
            f"{flags}: with slime's --allgather-cp a context parallel rank has a piece of the whole pack, "
            "and not two chunks of each document, by which rows are found here; omit --allgather-cp"
        )
    yield from refuse_graphs(
        args, flags, "a graph attends to the keys of the step that it was captured in", {ATTENTION}
    )
    yield from refuse_packs_of_megatron(args, flags)
    if flag := hybrid_flag(args):
        yield f"{flags}: models of {flag} pass no batch on to their layers; omit one of them"
    if asked.mass and platforms.current().name == "npu":
        yield (
            f"{RECORD}-mass: Ascend's operators are called run by run and return no probabilities; record on "
            "a GPU or CPU, or omit the flag"
        )
    for flag, folder in ((RECORD, asked.record), (REPLAY, asked.replay)):
        if folder is not None and folder.is_file():
            yield f"{flag} {folder} is a file; name a folder"
    held = None if asked.record is None else header_in(asked.record)
    if held is not None and (differences := list(held.problems(header_of(args)))):
        yield (
            f"{RECORD} {asked.record} has selections of another model: {'; '.join(differences)}; record "
            "into another folder"
        )
    if asked.replay is None or asked.replay.is_file():
        return
    if asked.record is not None and asked.record.resolve() == asked.replay.resolve():
        yield f"{RECORD} and {REPLAY} name one folder, {asked.replay}; record into another one"
    try:
        recording = Recording.open(asked.replay)
        differences = list(recording.header.problems(header_of(args)))
        if differences:
            yield f"{REPLAY} {asked.replay} is of another model: {'; '.join(differences)}"
        elif asked.missing == REFUSE:
            yield from _check_steps({key.step for key in recording.places()}, args, asked.replay)
    except RunError as error:
        yield f"{REPLAY}: {error}"


def _check_steps(recorded: set[int], args: Any, folder: Path) -> Iterator[str]:
    """Yield a problem if a job would end at a step that is not recorded."""
    last = argument(args, "train_iters")
    if not (recorded and last) or argument(args, "exit_interval") or argument(args, "exit_duration_in_mins"):
        return
    release = versions.of_job(args) or "0.17"
    # Before 0.17, Megatron-LM compares with the number of steps that have been made.
    shift = Version(release) < Version("0.17")
    skipped = {step + shift for step in argument(args, "iterations_to_skip") or ()}
    # A job that goes on from a checkpoint needs no earlier steps.
    missing = set(range(max(min(recorded), loaded_step(args) + 1), last + 1)) - recorded - skipped
    if missing:
        yield (
            f"{REPLAY} {folder} has no step {min(missing)}, and the job trains to {last}; set --train-iters "
            f"{min(missing) - 1}, or add --dsa-replay-missing select"
        )


_FLAGS = (
    Flag(
        RECORD,
        "Write the keys that each row of each layer attends to into DIR, one file per rank, behind the step; "
        "`python -m mindspeed_dsa selections DIR` reads them.",
        kind="value",
        metavar="DIR",
    ),
    Flag(
        f"{RECORD}-steps",
        "Record these steps only, as in 1-10,20 or 1-1000:50; default: all.",
        kind="value",
        type=Numbers.of,
        metavar="NUMBERS",
    ),
    Flag(
        f"{RECORD}-layers",
        "Record these layers only, from 1, those of multi-token prediction behind the decoder's.",
        kind="value",
        type=Numbers.of,
        metavar="NUMBERS",
    ),
    Flag(
        f"{RECORD}-rows",
        "Record the rows at these positions of a sequence only, from 0.",
        kind="value",
        type=Numbers.of,
        metavar="NUMBERS",
    ),
    Flag(
        f"{RECORD}-mass",
        "Also record each key's share of its row's attention, which says how much a selection that lacks "
        "the key "
        "loses; computes the attention once more.",
    ),
    Flag(
        REPLAY,
        "Attend to the keys recorded in DIR, at the same step, sequence, layer and row, whatever the indexer "
        "says; 'batch': to those that the job hands over with each microbatch.",
        kind="value",
        metavar="DIR",
    ),
    Flag(
        "--dsa-replay-missing",
        "End the job at a row whose recorded keys are missing or too few, or let the indexer select there. "
        "Default: refuse.",
        kind="value",
        choices=(REFUSE, SELECT),
    ),
)

RECORDED_SELECTIONS = Feature(
    name="dsa-recorded-selections",
    summary="Records which keys each row attends to, and attends to recorded ones again.",
    flags=(*_FLAGS, EXPERIMENTAL_ATTENTION_VARIANT, USE_FUSED_DSA),
    active=wanted,
    options=Options.of,
    check=check_selections,
    conflicts=(
        Conflict(
            "moe-batch-overlap",
            "halves of a microbatch attend apart, and selections are those of whole ones; omit one of them",
        ),
    ),
    doc="dsa-recorded-selections.md",
    patches=(
        Patch(
            "megatron.core.transformer.transformer_block:TransformerBlock.__init__",
            "wrap",
            f"{_HERE}.record:note_model",
            "a recording of another model is refused before the model is built",
            params=("config",),
        ),
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.forward",
            "wrap",
            f"{_HERE}.record:take_tokens",
            "selections are of certain tokens, and others are to be noticed",
            params=("input_ids",),
        ),
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.build_schedule_plan",
            "wrap",
            f"{_HERE}.record:take_tokens",
            "models that run in pairs are not called",
            params=("input_ids",),
            versions=">=0.14",
        ),
        *pipeline_steps.rows(
            f"{_HERE}.record:Steps",
            "says where a step of the schedule begins and ends",
            "says which microbatch's selections the layers are at",
            "lets go of what a forward has left",
            "says which microbatch's selections the forward of a pair is at",
        ),
    ),
)
