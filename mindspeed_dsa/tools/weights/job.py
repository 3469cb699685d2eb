"""Imports and exports requested by a command line, checked against the flags of the training job."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

from mindspeed_dsa import session
from mindspeed_dsa.features.checkpoints.agreement import decided
from mindspeed_dsa.features.checkpoints.hugging_face import (
    companions,
    config,
    mismatch,
    saving,
    written_config,
)
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import find
from mindspeed_dsa.features.checkpoints.hugging_face.exporting import Plan
from mindspeed_dsa.features.checkpoints.hugging_face.files import weights_of
from mindspeed_dsa.features.checkpoints.hugging_face.flags import (
    MISSING,
    before_0_14,
    prediction_layers,
    value_of,
)
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape
from mindspeed_dsa.features.checkpoints.hugging_face.torch_dist_files import Checkpoint
from mindspeed_dsa.megatron.configuration import check_weight_shards
from mindspeed_dsa.megatron.dsa import MODELS, uses_dsa
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, name_of, tracked
from mindspeed_dsa.tools.migrate import megatron_flags
from mindspeed_dsa.tools.weights.importing import WHO, Import, Progress
from mindspeed_dsa.tools.weights.model import release_here

_SHARING = ("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset", "dsa_indexer_topk_pattern")
_MULTIPLE = 128
"""Megatron's default of ``--make-vocab-size-divisible-by``."""


def import_of(source: Path, target: Path, flags: Sequence[str], dtype: str | None) -> Import:
    """Return the import requested by a command line.

    Args:
        source: folder of the Hugging Face model.
        target: folder of checkpoints.
        flags: job's flags, whose first word may be its script; only those that describe the model are read.
        dtype: name of the weights' dtype; None for the job's.

    Raises:
        SettingsError: the flags describe another model, or another checkpoint format.
        RunError: the files cannot be used.
    """
    described, _ = config.read_model(source, WHO)
    values = config.arguments_of(described, f"{WHO}: {source}")
    said = _said(values, flags)
    problems = mismatch.mismatches(values, _completed(values, said), release_here())
    if (format := getattr(said, "ckpt_format", "torch_dist")) != "torch_dist":
        problems.append(
            f"--ckpt-format {format} is not written: give torch_dist, which every layout loads, or train "
            f"with --load-hf {source}, which needs no checkpoint"
        )
    if problems:
        raise SettingsError(f"{WHO} import: {source}: " + "; ".join(problems))
    if hasattr(said, "moe_layer_freq"):
        values["moe_layer_freq"] = said.moe_layer_freq
    files = weights_of(source)
    if (predictions := prediction_layers(said)) is not None:
        values["mtp_num_layers"] = predictions or None
    vocabulary = _padded(values["vocab_size"], said)
    weights_dtype = getattr(torch, dtype) if dtype else _dtype(said, bool(flags))
    saved = argparse.Namespace(
        **values,
        padded_vocab_size=vocabulary,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        add_position_embedding=True,
    )
    return Import(files, target, values, vocabulary, weights_dtype, saved)


def remarks(wanted: Import, flags: Sequence[str]) -> list[str]:
    """Return notes on permitted differences between the files and the job's flags."""
    shape = Shape.of(argparse.Namespace(**wanted.values), wanted.files.architecture)
    left_out = mismatch.Mismatch.of(shape, wanted.files).notes()
    return [*mismatch.remarks(wanted.values, _said(wanted.values, flags)), *left_out]


def _said(values: Mapping[str, Any], flags: Sequence[str]) -> argparse.Namespace:
    """Parse the flags that describe the model; arguments without a flag are absent from the result."""
    parser = megatron_flags.RefusingParser(f"{WHO} import", prog="", add_help=False, allow_abbrev=False)
    for release in (release_here(), *reversed(megatron_flags.releases())):
        megatron_flags.add_recorded(parser, Version(release))
    session.add_arguments(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    words = list(flags[1:] if flags and not flags[0].startswith("-") else flags)
    said, _ = parser.parse_known_args(words)
    frequency = getattr(said, "moe_layer_freq", None)
    if isinstance(frequency, int) and "num_layers" in values:
        said.moe_layer_freq = [int(layer % frequency == 0) for layer in range(values["num_layers"])]
    return said


def _completed(values: Mapping[str, Any], said: argparse.Namespace) -> argparse.Namespace:
    """Return the job's model arguments: values of its flags, and the files' values for all others."""
    usual = dict(values)
    if before_0_14(release_here()) and "original_max_position_embeddings" in values:
        usual["max_position_embeddings"] = values["original_max_position_embeddings"]
    usual |= MODELS.get(getattr(said, "dsa_model", None) or "", {})
    # Megatron's default is YaRN, which is plain with a factor of 1.
    usual.pop("rope_type", None)
    if any(hasattr(said, name) for name in _SHARING):
        usual = {name: value for name, value in usual.items() if name not in _SHARING}
    # Decides which rows of the embedding are padding.
    usual["make_vocab_size_divisible_by"] = _MULTIPLE
    given = {name: value for name, value in usual.items() if value_of(said, name) is MISSING}
    return argparse.Namespace(**given, **vars(said))


def _padded(vocabulary: int, said: argparse.Namespace) -> int:
    if getattr(said, "padded_vocab_size", None):
        return int(said.padded_vocab_size)
    # As Megatron pads: 129280 rows with the default 128 and TP 8 become 130048 = 127 x 1024.
    multiple: int = getattr(said, "make_vocab_size_divisible_by", _MULTIPLE)
    step = multiple * getattr(said, "tensor_model_parallel_size", 1)
    return math.ceil(vocabulary / step) * step


def _dtype(said: argparse.Namespace, has_flags: bool) -> torch.dtype:
    # Without flags bf16, the model's usual dtype; with a job's flags its own, which is fp32 by default.
    if hasattr(said, "fp16"):
        return torch.float16
    return torch.bfloat16 if hasattr(said, "bf16") or not has_flags else torch.float32


# -- export ------------------------------------------------------------------------------------


def export(options: argparse.Namespace, progress: Progress) -> Plan:
    """Write the export requested by a command line; under torchrun, each process writes some of its files.

    Raises:
        RunError: on all ranks, if the checkpoint cannot be read or the files cannot be written.
    """
    # A machine may see the tracker later than the others, and would export another checkpoint.
    options.checkpoint = decided(lambda: newest(options.checkpoint), WHO)
    return saving.write_together(lambda: plan_of(options), progress, WHO)


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan of the requested export from a checkpoint: the folder of one step.

    Raises:
        RunError: the checkpoint cannot be read.
    """
    if options.like is not None:
        companions.require_own(options.like, WHO, weights=True)
    checkpoint = options.checkpoint
    args = Checkpoint(checkpoint).arguments()
    like = None
    if options.like is not None:
        like, _ = config.read_model(options.like, WHO)
        values = config.arguments_of(like, f"{WHO}: {options.like}")
        args = args or argparse.Namespace(**values)
        mismatches = mismatch.mismatches(values, args, release_here())
        # The second part of a message names a flag for the job, which an export does not have.
        if others := [each.rpartition(": ")[0] for each in mismatches]:
            raise SettingsError(
                f"{WHO} export: {checkpoint} is no model like {options.like}: {'; '.join(others)}; name the "
                "model with --like that it was trained from, or leave it out"
            )
    if args is None:
        raise RunError(f"{WHO}: {checkpoint} does not say which model it is of; name it with --like HF_DIR")
    if any(check_weight_shards(args, "")):
        raise SettingsError(
            f"{WHO} export: {checkpoint} is of a job with more weight shards than tensor parallel ranks, and "
            "has halves of gated weights in another order; export one of a job without them"
        )
    saved, notes = args, []
    if options.dsa_indexer_topk_pattern is not None:
        args = _with_pattern(saved, options.dsa_indexer_topk_pattern.upper(), checkpoint)
        gone = _layers_without(args, saved)
        notes = [f"layers {', '.join(map(str, gone))} are written without an indexer"] if gone else []
    tokens = companions.token_ids(getattr(args, "tokenizer_model", None))
    described = written_config.config_of(
        args,
        release_here(),
        WHO,
        vocabulary=None if like is None else like["vocab_size"],
        dtype=options.dtype or "bfloat16",
        like=like,
        tokens=tokens,
    )
    architecture = find(described, WHO)
    return Plan(
        checkpoint=checkpoint,
        target=options.target,
        config=described,
        shape=Shape.of(args, architecture),
        saved_shape=None if args is saved else Shape.of(saved, architecture),
        vocabulary=described["vocab_size"],
        dtype=getattr(torch, options.dtype) if options.dtype else None,
        shard_bytes=options.shard_size,
        fp8_blocks=options.fp8_blocks,
        like=options.like,
        notes=[*notes, *written_config.notes(described, like, args, tokens)],
    )


def _with_pattern(args: argparse.Namespace, pattern: str, checkpoint: Path) -> argparse.Namespace:
    """Return a model's arguments with a pattern in place of its own rule of which layers select.

    Raises:
        SettingsError: the model has no such pattern.
    """
    option = f"{WHO} export: --dsa-indexer-topk-pattern {pattern}"
    if not uses_dsa(args):
        raise SettingsError(f"{option}: {checkpoint} has no indexers; leave it out")
    shared = dict(zip(_SHARING, (1, 0, pattern), strict=True))
    changed = argparse.Namespace(**{**vars(args), **shared})
    if problems := list(Sharing.of(changed).problems(args.num_layers)):
        raise SettingsError(f"{WHO} export: {'; '.join(problems)}")
    if more := _layers_without(args, changed):
        raise SettingsError(
            f"{option}: layers {', '.join(map(str, more))} of {checkpoint} have no indexer, so they cannot "
            "compute; write S for them"
        )
    return changed


def _layers_without(args: argparse.Namespace, others: argparse.Namespace) -> list[int]:
    """Return the decoder layers that share by some arguments and compute by others."""
    one, other = Sharing.of(args), Sharing.of(others)
    return [n for n in range(1, args.num_layers + 1) if other.computes(n) and not one.computes(n)]


def newest(folder: Path) -> Path:
    """Return the newest checkpoint of a folder by its tracker file, or the folder if it has none.

    Raises:
        RunError: the tracker file is damaged.
    """
    if not (folder / TRACKER).is_file():
        return folder
    latest, wrong = tracked(folder)
    if latest is None:
        raise RunError(f"{WHO}: {folder}: {wrong}; name the folder of a checkpoint in it")
    return folder / (name_of(latest) if isinstance(latest, int) else latest)


@contextlib.contextmanager
def processes() -> Iterator[None]:
    """Initialize the default process group in the block, if torchrun or the like started this process."""
    alone = "WORLD_SIZE" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        if not alone:
            dist.destroy_process_group()
