"""A checkpoint of Megatron's written as Hugging Face's files, a tensor at a time."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import log
from mindspeed_dsa.features.checkpoints.hugging_face import companions, fp8
from mindspeed_dsa.features.checkpoints.hugging_face.comparison import listed, weights_of
from mindspeed_dsa.features.checkpoints.hugging_face.files import FACTORS, WeightFiles, stamps_of
from mindspeed_dsa.features.checkpoints.hugging_face.names import (
    REPEATED,
    Place,
    Shape,
    UnknownName,
    place_of,
)
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import PADDED
from mindspeed_dsa.features.checkpoints.hugging_face.shard_files import (
    ShardFile,
    TensorSpec,
    divide,
    require_disk_space,
    write_index,
)
from mindspeed_dsa.features.checkpoints.hugging_face.threads import in_threads, one_at_a_time
from mindspeed_dsa.features.checkpoints.hugging_face.torch_dist_files import Reader
from mindspeed_dsa.runs.files import (
    RunError,
    Sole,
    beside,
    delete,
    sweep,
    sync,
    sync_tree,
    write_atomically,
)

_JOB = "export.json"
_NOT_QUANTISED = (
    "layernorm",
    "norm",
    "mlp.gate.",
    "weights_proj",
    "embed_tokens",
    "lm_head",
    "eh_proj",
    "shared_head",
)
"""Parts of names of weights that DeepSeek's files never have in FP8."""
_OF_OPTIMIZER = ("optimizer.", "chained_", "rng_state", "rerun_state")


@dataclass(frozen=True)
class Wish:
    """Request for an export.

    Attributes:
        checkpoint: folder of a ``torch_dist`` checkpoint, ``iter_...`` or ``release``.
        target: folder of the model's files; it must not exist, unless ``replaces``.
        config: content of its ``config.json``.
        shape: which tensors the model has.
        vocabulary: rows of the embedding, without padding.
        dtype: of weights that are not in FP8, routers' biases apart; None: as ``like`` has them, else bf16.
        shard_bytes: largest file.
        fp8_blocks: linear weights are written in FP8, in blocks with a factor each.
        like: folder of the model that was trained from: its types, factors, and files beside the weights.
        replaces: a folder at ``target`` stays until the new one is whole, and is deleted then.
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
    replaces: bool = False


@dataclass(frozen=True)
class _Source:
    """Where a tensor of Hugging Face's lies in a checkpoint.

    Attributes:
        key: of the checkpoint.
        offset: of the tensor among what the key stacks.
        begin: first row in Megatron's tensor.
        shape: of Hugging Face's tensor.
        dtype: in the checkpoint.
    """

    key: str
    offset: tuple[int, ...]
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Export:
    """A planned export, whose files several processes may write.

    Args:
        wish: what is to be exported.

    Raises:
        RunError: the checkpoint is not whole, or does not have the model's tensors.
    """

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self._sole: Sole | None = None
        self._reader = Reader(wish.checkpoint)
        self._like = like = weights_of(wish.like) if wish.like is not None else None
        # Of a model without FP8 nothing can be learnt about which weights have it.
        self._like_has_fp8 = like is not None and any(
            like.dtype(name) == torch.float8_e4m3fn for name in like.names
        )
        self._sources = self._find()
        self._described = [self._describe(name) for name in self._sources]
        self._entries = [entry for each in self._described for entry in each]
        self.shards = divide(self._entries, wish.shard_bytes)

    @property
    def partial(self) -> Path:
        """Folder of what is not finished."""
        return self.wish.target.with_name(f".{self.wish.target.name}.partial")

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(shard.nbytes for shard in self.shards)

    # -- what there is -------------------------------------------------------------------------

    def _find(self) -> dict[str, _Source]:
        """Return where each of Hugging Face's tensors lies, in the order of the model."""
        stacks = self._stacks()
        missing, found = [], dict[str, _Source]()
        wanted = list(self.wish.shape.places())
        for place in wanted:
            if place not in stacks:
                missing.append(str(place))
                continue
            found.update(self._parts(place, *stacks[place]))
        more = sorted(str(place) for place in stacks.keys() - set(wanted))
        problems = [f"lacks {listed(missing)}"] if missing else []
        problems += [f"has {listed(more)}, which the model does not"] if more else []
        if problems:
            raise RunError(
                f"mindspeed_dsa weights: {self.wish.checkpoint} {' and '.join(problems)}; its "
                "arguments, or the config.json that was named, describe another model; name one of this model"
            )
        self._repeat(found)
        if self._like is not None:
            self._compare(found, self._like)
        return found

    def _compare(self, found: Mapping[str, _Source], like: WeightFiles) -> None:
        """Refuse a model whose tensors have other shapes than those of the one that it is to be like."""
        shapes = {name: like.shape(name) for name in found if name in like.names}
        others = [
            f"{name} {list(found[name].shape)} and not {list(shape)}"
            for name, shape in shapes.items()
            if shape != found[name].shape
        ]
        if others:
            raise RunError(
                f"mindspeed_dsa weights: {self.wish.checkpoint} is no model like {like.folder}: it has "
                f"{listed(others)}; name the model with --like that it was trained from, or leave it out"
            )

    def _stacks(self) -> dict[Place, tuple[str, tuple[int, ...]]]:
        """Return for each tensor of the checkpoint its key, and its offset among what that stacks."""
        stacks: dict[Place, tuple[str, tuple[int, ...]]] = {}
        for key, stored in self._reader.tensors.items():
            if key.startswith(_OF_OPTIMIZER):
                continue
            rank = 1 if key.endswith(("norm.weight", "norm_weight", "norm.bias", "expert_bias")) else 2
            stacked = len(stored.shape) - rank
            offsets: list[tuple[int, ...]] = [()]
            for axis in range(stacked):
                offsets = [(*o, index) for o in offsets for index in range(stored.shape[axis])]
            for offset in offsets:
                place, used = place_of(key, offset)
                if used != stacked:
                    raise UnknownName(
                        f"mindspeed_dsa weights: {key} has {stacked} stacked axes, and its name says {used}"
                    )
                stacks[place] = key, offset
        return stacks

    def _parts(self, place: Place, key: str, offset: tuple[int, ...]) -> Mapping[str, _Source]:
        stored, wish = self._reader.tensors[key], self.wish
        rows, *rest = stored.shape[len(offset) :]
        names = place.theirs(wish.shape.layers)
        if place.name in PADDED:
            if rows < wish.vocabulary:
                raise RunError(
                    f"mindspeed_dsa weights: {place} has {rows} rows, and config.json a vocabulary of "
                    f"{wish.vocabulary}; name the config.json of this model"
                )
            rows = wish.vocabulary
        height = rows // len(names)
        return {
            name: _Source(key, offset, part * height, (height, *rest), stored.dtype)
            for part, name in enumerate(names)
        }

    def _repeat(self, found: dict[str, _Source]) -> None:
        """Add what layers of multi-token prediction repeat of the model, as released files do."""
        shape = self.wish.shape
        for layer in range(len(shape.prediction_indexers)):
            for name, original in REPEATED.items():
                repeated = f"model.layers.{shape.layers + layer}.{name}"
                wanted = self._like is None or repeated in self._like.names
                if wanted and original in found:
                    found[repeated] = found[original]

    def _describe(self, name: str) -> list[TensorSpec]:
        source = self._sources[name]
        dtype = self._dtype(name, source)
        entries = [TensorSpec(name, dtype, source.shape)]
        if dtype == torch.float8_e4m3fn:
            blocks = fp8.factors_shape(source.shape)
            entries.append(TensorSpec(name + FACTORS, self._factors_dtype(name), blocks))
        return entries

    def _dtype(self, name: str, source: _Source) -> torch.dtype:
        known = self._like is not None and name in self._like.names
        stored = self._like.dtype(name) if known and self._like is not None else None
        if self.wish.fp8_blocks:
            by_rule = len(source.shape) == 2 and not any(part in name for part in _NOT_QUANTISED)
            by_like = stored == torch.float8_e4m3fn
            if by_like if stored is not None and self._like_has_fp8 else by_rule:
                return torch.float8_e4m3fn
        stored = None if stored == torch.float8_e4m3fn else stored
        if name.endswith("e_score_correction_bias"):
            return stored or torch.float32  # it is trained by steps that bf16 would round away
        return self.wish.dtype or stored or torch.bfloat16

    def _factors_dtype(self, name: str) -> torch.dtype:
        known = self._like is not None and name in self._like.names
        stored = self._like.factors_dtype(name) if known and self._like is not None else None
        return stored or torch.float32

    # -- writing -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the folder, or go on with that of an interrupted export; one process does it.

        Raises:
            RunError: something has that name already, another process writes it, or there is no room.
        """
        target = self.wish.target
        self._require_room_for_name()
        self._sole = Sole(target.with_name(f".{target.name}.lock"), f"mindspeed_dsa weights: {target}")
        self._require_room_for_name()  # another export may have ended meanwhile
        partial = self.partial
        known, mark = partial / _JOB, self._mark()
        if partial.exists() and not (known.exists() and known.read_text(encoding="utf-8") == mark):
            shutil.rmtree(partial)
        partial.mkdir(parents=True, exist_ok=True)
        sweep(partial)
        written = sum(file.stat().st_size for file in partial.glob("*.safetensors"))
        require_disk_space(partial, self.bytes - written)
        write_atomically(known, mark)

    def _require_room_for_name(self) -> None:
        if self.wish.target.exists() and not self.wish.replaces:
            raise RunError(
                f"mindspeed_dsa weights: {self.wish.target} exists already; remove it, or name another folder"
            )

    def _mark(self) -> str:
        index = os.stat(self.wish.checkpoint / ".metadata")
        entries = [[entry.name, str(entry.dtype), entry.shape] for entry in self._entries]
        like = self._like
        facts = [
            str(self.wish.checkpoint),
            index.st_mtime_ns,
            index.st_size,
            str(self.wish.like),
            like and [stamps_of(like.folder), like.quantised],
            self.wish.shard_bytes,
        ]
        return json.dumps([facts, entries])

    def write(self, rank: int, ranks: int, progress: Callable[[int], Callable[[int], None]]) -> None:
        """Write this process's share of the files; those that an interrupted export has finished stay.

        Args:
            rank: of this process.
            ranks: that share the work.
            progress: called with all bytes of the share; what it returns is called with each tensor's.
        """
        mine = self.shards[rank::ranks]
        wrote = one_at_a_time(progress(sum(tensor.nbytes for shard in mine for tensor in shard.tensors)))
        for shard in mine:
            if (self.partial / shard.file).exists():
                wrote(sum(tensor.nbytes for tensor in shard.tensors))
                continue
            with ShardFile(self.partial, shard) as file:
                in_threads(partial(self._write, file, shard.dtypes, wrote), shard.dtypes)

    def _write(
        self,
        file: ShardFile,
        dtypes: Mapping[str, torch.dtype],
        wrote: Callable[[int], None],
        name: str,
    ) -> None:
        """Write a weight, with its factors if they are in the same file, or factors alone."""
        made: dict[str, Tensor | None] = {}
        if name in self._sources:
            made[name], made[name + FACTORS] = self._weight(name, dtypes[name])
        elif name.removesuffix(FACTORS) not in dtypes:
            _, made[name] = self._weight(name.removesuffix(FACTORS), torch.float8_e4m3fn)
        for each, tensor in made.items():
            if each in dtypes and tensor is not None:
                file.write(each, tensor.to(dtypes[each]))  # factors may have one of their own
                wrote(tensor.numel() * dtypes[each].itemsize)

    def _weight(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return a weight, with its factors if it is to be in FP8."""
        source = self._sources[name]
        quantised = dtype == torch.float8_e4m3fn
        begin = (*source.offset, source.begin, *[0] * (len(source.shape) - 1))
        shape = (*[1] * len(source.offset), *source.shape)
        read = self._reader.read(source.key, begin, shape, source.dtype if quantised else dtype)
        out = read.reshape(source.shape)
        if not quantised:
            return out, None
        like, factors = self._like, None
        if like is not None and name in like.names and like.block == fp8.BLOCK:
            factors = like.factors(name)
        powers = like is not None and like.quantised.get("scale_fmt") == fp8.POWERS_OF_TWO
        powers = powers or self._factors_dtype(name) != torch.float32
        try:
            return fp8.quantise(out, factors, powers_of_two=powers)
        except RunError as error:
            raise RunError(f"mindspeed_dsa weights: {self.wish.checkpoint}: {name}: {error}") from error

    def publish(self) -> None:
        """Write what stands beside the weights, and name the folder; one process does it in the end."""
        partial, config = self.partial, dict(self.wish.config)
        write_index(partial, self.shards)
        # Which loaders take for all weights; the embedding is in FP8 nowhere.
        embedding = Place("", -1, -1, "embedding.word_embeddings.weight").theirs(0)[0]
        config["dtype"] = str(self._dtype(embedding, self._sources[embedding])).removeprefix("torch.")
        config.pop("quantization_config", None)
        if self.wish.fp8_blocks:
            config["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                **(self._like.quantised if self._like is not None else {}),
                "weight_block_size": list(fp8.BLOCK),
            }
        write_atomically(partial / "config.json", json.dumps(config, indent=2) + "\n")
        if self.wish.like is not None:
            companions.copy(self.wish.like, partial)
        (partial / _JOB).unlink()
        sync_tree(partial)
        self._name()

    def _name(self) -> None:
        """Give the folder its name, and delete the one that it replaces."""
        target = self.wish.target
        stale = beside(target, "replaced")
        replaces = self.wish.replaces and target.exists()
        if replaces:
            os.rename(target, stale)
        try:
            os.rename(self.partial, target)
        except BaseException:
            if replaces and not target.exists():
                os.rename(stale, target)
            raise
        sync(target.parent)
        for old in target.parent.glob(f".{glob.escape(target.name)}.*.replaced"):  # killed writers' as well
            try:
                delete(old)
            except OSError as error:
                log.get().warning("%s, which %s replaces, cannot be deleted: %s", old, target, error)

    def end(self) -> None:
        """Let others write the folder; whoever has called :meth:`begin` does it, in whatever way it ends."""
        if self._sole is not None:
            self._sole.end()
