"""Export of a Megatron checkpoint to Hugging Face files, one tensor at a time."""

from __future__ import annotations

import glob
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import log
from mindspeed_dsa.features.checkpoints.hugging_face import companions, fp8
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import MODEL
from mindspeed_dsa.features.checkpoints.hugging_face.config import FILE
from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader, weights_of
from mindspeed_dsa.features.checkpoints.hugging_face.layouts import FACTORS
from mindspeed_dsa.features.checkpoints.hugging_face.names import (
    PADDED,
    Place,
    Shape,
    UnknownName,
    listed,
    place_of,
)
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import Piece, in_threads
from mindspeed_dsa.features.checkpoints.hugging_face.shard_files import Writer, divide, write_index
from mindspeed_dsa.features.checkpoints.hugging_face.torch_dist_files import Checkpoint
from mindspeed_dsa.megatron.configuration import argument, loaded_step
from mindspeed_dsa.runs.files import RunError, Sole, beside, delete, sync, sync_tree
from mindspeed_dsa.runs.whole_checkpoints import iterations, name_of

ORIGIN = "dsa_export.json"
"""File of an exported model that names the checkpoint, by which a job knows its own exports."""
_WHO = "mindspeed_dsa weights"
_NOT_QUANTISED = (
    "layernorm",
    "norm",
    "gate.",
    "weights_proj",
    "embed_tokens",
    "lm_head",
    "eh_proj",
    "shared_head",
)
"""Name parts of weights that DeepSeek's files never store in FP8."""
_OF_OPTIMIZER = ("optimizer.", "chained_", "rng_state", "rerun_state")
_VECTORS = ("norm.weight", "norm_weight", "bias")


def origin_of(target: Path) -> dict[str, Any]:
    """Return the content of the file :data:`ORIGIN` in a model's folder; an empty dict without one."""
    return companions.read(target / ORIGIN)


def refusal(target: Path, save: Path) -> str:
    """Return an error if ``target`` is no export of the job with this ``--save``, or an empty string."""
    writer, job = origin_of(target).get("save"), str(save.resolve())
    if writer == job:
        return ""
    whose = "is no export of a job" if writer is None else f"is of {writer}"
    return f"{target} {whose}, and not of {job}; give --save-hf another folder"


def refusals(job: Any, folder: Path, interval: int) -> Iterator[str]:
    """Yield an error for each existing folder that the job would export to and may not replace.

    Args:
        job: Megatron's arguments, with ``save``.
        folder: parent folder of the exported models.
        interval: number of steps between exports; 0 exports the last checkpoint only.
    """
    last, start = argument(job, "train_iters"), loaded_step(job)
    end = last or math.inf
    for step in reversed(iterations(folder)):
        is_in_between = interval and step % interval == 0 and start < step < end
        if (step == last or is_in_between) and (message := refusal(folder / name_of(step), Path(job.save))):
            yield message


@dataclass
class Plan:
    """Plan of an export whose files are written by several processes.

    Attributes:
        checkpoint: folder of a ``torch_dist`` checkpoint, ``iter_...`` or ``release``.
        target: folder of the exported files; it must not exist, unless ``replaces``.
        config: content of the exported ``config.json``.
        shape: layers of the model, which decide its tensors.
        saved_shape: layers of the checkpoint, if it may have indexers that the files do not get; ``None`` if
            all its tensors are exported.
        vocabulary: number of embedding rows without padding. Without ``like`` it is raised to the last row
            that holds anything: a tokenizer may know fewer tokens than the model's files had rows.
        dtype: dtype of weights that are not in FP8, except router biases; default: ``like``'s dtype, or bf16.
        shard_bytes: maximum size of a file in bytes.
        fp8_blocks: whether to write linear weights in FP8 with one factor per block.
        like: folder of the model that training started from; gives dtypes, factors and tokenizer files.
        replaces: whether ``target`` may exist. It is then deleted once the new folder is complete.
        notes: sentences on the written configuration, for the user.
        origin: content of the file :data:`ORIGIN`; empty for none.
        shards: dict from file name to its tensors, on the meta device.

    Raises:
        RunError: the checkpoint is incomplete or does not have the model's tensors.
    """

    checkpoint: Path
    target: Path
    config: Mapping[str, Any]
    shape: Shape
    vocabulary: int
    dtype: torch.dtype | None = None
    shard_bytes: int = 5 * 10**9
    fp8_blocks: bool = False
    like: Path | None = None
    saved_shape: Shape | None = None
    replaces: bool = False
    notes: list[str] = field(default_factory=list)
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sole: Sole | None = None
        self._reader = Checkpoint(self.checkpoint)
        self._like = like = None if self.like is None else weights_of(self.like)
        # In a model without FP8, dtypes do not tell which weights to quantise.
        self._like_has_fp8 = like is not None and any(
            like.dtype(name) == torch.float8_e4m3fn for name in like.names
        )
        if self.like is not None:
            self.notes += companions.notes(self.like)
        # Padding rows of a tied embedding learn in the output layer, so that they say nothing.
        is_tied = self.config.get("tie_word_embeddings", False)
        if not (like is not None and is_tied) and (rows := self._filled_rows()) > self.vocabulary:
            self.notes.append(
                f"config.json has a vocab_size of {rows}: the job has a vocabulary of {self.vocabulary}, and "
                "rows above it hold numbers, and are written"
            )
            self.vocabulary = rows
        self._pieces = self._find()
        self.shards = divide(self._described(), self.shard_bytes)

    @property
    def partial(self) -> Path:
        """Folder of the unfinished export."""
        return self.target.with_name(f".{self.target.name}.partial")

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(map(_nbytes, self.shards.values()))

    # -- tensors -------------------------------------------------------------------------------

    def _find(self) -> dict[str, list[Piece]]:
        """Return a dict from Hugging Face tensor to the checkpoint regions with its rows, in model order."""
        stacks, wanted = dict(self._stacks()), list(self.shape.places())
        missing = [str(place) for place in wanted if place not in stacks]
        saved = wanted if self.saved_shape is None else list(self.saved_shape.places())
        left_out = {place for place in saved if place.indexer}
        more = sorted(str(place) for place in stacks.keys() - set(wanted) - left_out)
        problems = [f"lacks {listed(missing)}"] if missing else []
        problems += [f"has {listed(more)}, which the model does not"] if more else []
        if problems:
            raise RunError(
                f"{_WHO}: {self.checkpoint} {' and '.join(problems)}; its arguments, or the config.json that "
                "was named, describe another model; name one of this model"
            )
        pieces: dict[str, list[Piece]] = {}
        for place in wanted:
            for name, piece in self._split(place, *stacks[place]):
                pieces.setdefault(name, []).append(piece)
        # Multi-token prediction layers repeat some tensors of the model, as in released files.
        for repeated, original in self.shape.repeated():
            if original in pieces and (self._like is None or repeated in self._like.names):
                pieces[repeated] = pieces[original]
        if self._like is not None and self.saved_shape is None:
            # Indexers of layers that share a selection: they are not trained, and stay with the model.
            pieces |= {
                name: [_kept(self._like, name)] for name in self.shape.idle() if name in self._like.names
            }
        others = [
            f"{name} {list(_whole(parts).shape)} and not {list(self._like.shape(name))}"
            for name, parts in pieces.items()
            if self._like is not None
            and name in self._like.names
            and not _fits(parts, self._like.shape(name))
        ]
        if others:
            raise RunError(
                f"{_WHO}: {self.checkpoint} is no model like {self.like}: it has {listed(others)}; name the "
                "model with --like that it was trained from, or leave it out"
            )
        return pieces

    def _filled_rows(self) -> int:
        """Return the number of embedding rows up to the last nonzero one; padding rows are zero."""
        key = "embedding.word_embeddings.weight"
        if (stored := self._reader.tensors.get(key)) is None or stored.size[0] <= self.vocabulary:
            return self.vocabulary  # missing tensors are reported with all others
        shape = (stored.size[0] - self.vocabulary, stored.size[1])
        data = torch.empty(shape, dtype=stored.properties.dtype, device="meta")
        piece = Piece(place_of(key)[0], key, tuple(stored.size), (self.vocabulary, 0), shape, 0, data)
        filled = self._reader.read(piece, data.dtype).ne(0).any(1).nonzero()
        return self.vocabulary + (int(filled[-1]) + 1 if len(filled) else 0)

    def _stacks(self) -> Iterator[tuple[Place, tuple[str, tuple[int, ...]]]]:
        """Yield the place of each checkpoint tensor, with its key and its offset along stacked axes."""
        for key, stored in self._reader.tensors.items():
            if key.startswith(_OF_OPTIMIZER):
                continue
            stacked = len(stored.size) - (1 if key.endswith(_VECTORS) else 2)
            # [layers, experts, rows, columns] -> one tensor per layer and expert.
            for offset in itertools.product(*map(range, stored.size[:stacked])):
                place, used = place_of(key, offset)
                if used != stacked:
                    raise UnknownName(f"{_WHO}: {key} has {stacked} stacked axes, and its name says {used}")
                yield place, (key, offset)

    def _split(self, place: Place, key: str, offset: tuple[int, ...]) -> Iterator[tuple[str, Piece]]:
        """Yield the Hugging Face tensors that one checkpoint tensor concatenates, each with its region."""
        stored = self._reader.tensors[key]
        rows, *rest = stored.size[len(offset) :]
        if place.name in PADDED:
            if rows < self.vocabulary:
                raise RunError(
                    f"{_WHO}: {place} has {rows} rows, and config.json a vocabulary of {self.vocabulary}; "
                    "name the config.json of this model"
                )
            rows = self.vocabulary
        height = 0
        for name, first, last in self.shape.segments(place, rows):
            data = torch.empty(last - first, *rest, dtype=stored.properties.dtype, device="meta")
            begin = (*offset, height, *[0] * len(rest))
            shape = (*[1] * len(offset), *data.shape)
            yield name, Piece(place, key, tuple(stored.size), begin, shape, len(offset), data)
            height += last - first

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        pieces = self._pieces[name]
        if pieces[0].key:
            parts = [self._reader.read(piece, dtype) for piece in pieces]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        assert self._like is not None
        kept = torch.empty(pieces[0].shape, dtype=dtype)
        self._like.read_into(kept, name)
        return kept

    def _described(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the exported files, on the meta device."""
        for name, pieces in self._pieces.items():
            dtype, whole = self._dtype(name), _whole(pieces)
            yield name, whole.to(dtype)
            if dtype == torch.float8_e4m3fn:
                blocks = fp8.factors_shape(tuple(whole.shape))
                yield name + FACTORS, torch.empty(blocks, dtype=self._factors_dtype(name), device="meta")

    def _dtype(self, name: str) -> torch.dtype:
        stored = self._like.dtype(name) if self._like is not None and name in self._like.names else None
        if self.fp8_blocks:
            is_matrix = self._pieces[name][0].data.dim() == 2
            by_rule = is_matrix and not any(part in name for part in _NOT_QUANTISED)
            by_like = stored == torch.float8_e4m3fn
            # A weight that `like` lacks follows the rule.
            if by_like if stored is not None and self._like_has_fp8 else by_rule:
                return torch.float8_e4m3fn
        stored = None if stored == torch.float8_e4m3fn else stored
        if name.endswith("e_score_correction_bias"):
            return stored or torch.float32  # bf16 would round away its training steps
        return self.dtype or stored or torch.bfloat16

    def _not_fp8(self, known: Sequence[str]) -> list[str]:
        """Return the modules with linear weights that are not in FP8, unless loaders know them.

        Args:
            known: modules that the model's ``quantization_config`` names already.
        """
        never = self.shape.architecture.never_fp8
        modules = [
            name.removesuffix(".weight")
            for name, pieces in self._pieces.items()
            if pieces[0].data.dim() == 2 and self._dtype(name) != torch.float8_e4m3fn
        ]
        unknown = [
            module
            for module in modules
            if not module.endswith(never)
            and not any(module.endswith(each) or module.startswith(f"{each}.") for each in known)
        ]
        # With a list, transformers no longer excludes the head by itself. A tied head has no weight here.
        return [*unknown, *(["lm_head"] if unknown and "lm_head" not in known else [])]

    def _factors_dtype(self, name: str) -> torch.dtype:
        like = self._like if self._like is not None and self._like.block(name) == fp8.BLOCK else None
        stored = None if like is None else like.factors_dtype(name)
        # fp16 has too few exponents for new factors.
        return stored if stored in (torch.bfloat16, torch.float8_e8m0fnu) else torch.float32

    # -- writing -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Create the folder of the unfinished export; called by one process.

        Raises:
            RunError: the target exists, or another process is writing it.
        """
        self._require_free_name()
        self._sole = Sole(self.target.with_name(f".{self.target.name}.lock"), f"{_WHO}: {self.target}")
        self._require_free_name()  # another export may have finished before the lock was taken
        delete(self.partial)  # left by a killed export
        self.partial.mkdir(parents=True)

    def _require_free_name(self) -> None:
        if self.target.exists() and not self.replaces:
            raise RunError(f"{_WHO}: {self.target} exists already; remove it, or name another folder")

    def write(self, rank: int, ranks: int, progress: Callable[[int], Callable[[int], None]]) -> None:
        """Write the files that are assigned to this process.

        Args:
            rank: index of this process.
            ranks: number of processes that share the work.
            progress: function that takes this process's total bytes, and returns a callback for the bytes
                of each written tensor.
        """
        # Processes share whole files, round robin: no two of them write the same file.
        mine = list(self.shards.items())[rank::ranks]
        wrote = progress(sum(_nbytes(tensors) for _, tensors in mine))
        for file, tensors in mine:
            with Writer(self.partial / file, tensors) as writer:
                weights = dict.fromkeys(name.removesuffix(FACTORS) for name in tensors)
                for done in in_threads(partial(self._write, writer, tensors), weights):
                    wrote(done)

    def _write(self, writer: Writer, tensors: Mapping[str, Tensor], name: str) -> int:
        """Write a weight and its factors, as far as they belong to the writer's file; return their bytes."""
        parts = dict(zip((name, name + FACTORS), self._weight(name), strict=True))
        # Factors may be in the next file, and may have another dtype.
        made = {
            key: part.to(tensors[key].dtype)
            for key, part in parts.items()
            if part is not None and key in tensors
        }
        for key, part in made.items():
            writer.write(key, part)
        return _nbytes(made)

    def _weight(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a weight, and its factors if it is to be stored in FP8."""
        dtype, like = self._dtype(name), self._like
        if dtype != torch.float8_e4m3fn:
            return self._read(name, dtype), None
        factors = like.factors(name) if like is not None and like.block(name) == fp8.BLOCK else None
        # With the factors that it was read with, an unchanged weight gives the same bytes again.
        stored = self._factors_dtype(name)
        powers = like is not None and like.quantised.get("scale_fmt") == fp8.POWERS_OF_TWO
        powers = powers or stored == torch.float8_e8m0fnu  # which has powers of two only
        try:
            weight = self._read(name, self._pieces[name][0].data.dtype)
            return fp8.quantise(weight, factors, powers_of_two=powers, factors_dtype=stored)
        except RunError as error:
            raise RunError(f"{_WHO}: {self.checkpoint}: {name}: {error}") from error

    def publish(self) -> None:
        """Write the other files and rename the folder to its target; called last, by one process."""
        config = dict(self.config)
        write_index(self.partial, self.shards)
        # Loaders take this dtype for all weights. The embedding is never in FP8, so its dtype is used.
        (embedding,) = MODEL["embedding.word_embeddings.weight"]
        config["dtype"] = config["torch_dtype"] = str(self._dtype(embedding)).removeprefix("torch.")
        config["vocab_size"] = self.vocabulary
        config.pop("quantization_config", None)
        if self.fp8_blocks:
            quantised = {} if self._like is None else self._like.quantised
            # Other methods describe factors of other names and shapes than those that are written.
            quantised = quantised if quantised.get("quant_method") == "fp8" else {}
            config["quantization_config"] = {
                "fmt": "e4m3",
                "quant_method": "fp8",
                **quantised,
                "activation_scheme": "dynamic",
                "weight_block_size": list(fp8.BLOCK),
            }
            known = quantised.get("modules_to_not_convert")
            known = known if isinstance(known, list) else []
            if more := self._not_fp8(known):
                config["quantization_config"]["modules_to_not_convert"] = [*known, *more]
        (self.partial / FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self.like is not None:
            companions.copy(self.like, self.partial)
        if self.origin:
            (self.partial / ORIGIN).write_text(json.dumps(self.origin) + "\n", encoding="utf-8")
        sync_tree(self.partial)
        self._name()

    def _name(self) -> None:
        """Rename the folder to its target, and delete the folder that it replaces."""
        target = self.target
        stale = beside(target, "replaced")
        replaces = self.replaces and target.exists()
        if replaces:
            os.rename(target, stale)  # a rename does not replace a folder with files
        try:
            os.rename(self.partial, target)
        except BaseException:
            if replaces and not target.exists():
                os.rename(stale, target)
            raise
        # Make the rename durable before the old folder is deleted.
        sync(target.parent)
        # Includes folders that killed exports have left.
        for old in target.parent.glob(f".{glob.escape(target.name)}.*.replaced"):
            try:
                delete(old)
            except OSError as error:
                log.get().warning("%s, which %s replaces, cannot be deleted: %s", old, target, error)

    def end(self) -> None:
        """Release the lock of the target; must be called after :meth:`begin` even on failure."""
        if self._sole is not None:
            self._sole.end()


def _kept(like: Reader, name: str) -> Piece:
    """Return a piece for a weight that only the reference model has, with an empty checkpoint key."""
    shape, dtype = like.shape(name), like.dtype(name)
    dtype = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    data = torch.empty(shape, dtype=dtype, device="meta")
    return Piece(Place("", -1, -1, name), "", shape, (0,) * len(shape), shape, 0, data)


def _fits(pieces: Sequence[Piece], stored: tuple[int, ...]) -> bool:
    """Return whether pieces make a tensor of the shape ``stored``, or of one with fewer tokens."""
    rows, *rest = _whole(pieces).shape
    more = pieces[0].place.name in PADDED and rows >= stored[0]
    return tuple(rest) == tuple(stored[1:]) and (more or rows == stored[0])


def _whole(pieces: Sequence[Piece]) -> Tensor:
    """Return the Hugging Face tensor that consists of ``pieces``, on the meta device."""
    return torch.cat([piece.data for piece in pieces])


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
