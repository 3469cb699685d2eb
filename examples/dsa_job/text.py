"""Text on disk to Megatron's indexed file, built once and kept in a cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsa_job.tokenizers import Tokenizer
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.runs.files import RunError, lock, write_atomically

FORMAT = 1  # raise when the same text would be indexed differently
FEWEST_DOCUMENTS = 40
_SNIFFED = 8192
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """Text files that make a corpus.

    Attributes:
        root: file or folder given by the user.
        files: path below the root, size in bytes and modification time in ns, in the order of documents.
        skipped: number of files that are not text.
    """

    root: Path
    files: tuple[tuple[str, int, int], ...]
    skipped: int = 0

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(size for _, size, _ in self.files)

    def path(self, name: str) -> Path:
        """Return the path of the file of that name."""
        return self.root / name if self.root.is_dir() else self.root


@dataclass(frozen=True)
class Corpus:
    """An indexed file and its statistics.

    Attributes:
        prefix: path of the ``.bin`` and ``.idx`` files without that ending.
        unigram_entropy: entropy in nats: the loss of a model that knows only the tokens' frequencies.
    """

    prefix: str
    documents: int
    tokens: int
    text_bytes: int
    unigram_entropy: float

    def __str__(self) -> str:
        return (
            "{text_bytes:,} bytes of text, {documents:,} documents, {tokens:,} tokens; unigram entropy "
            "{unigram_entropy:.4f} nats per token".format(**asdict(self))
        )


def find_text(data: str | None) -> Source:
    """List the text below a file or folder; by default the Python standard library's sources.

    Files are ordered by a hash of their name. A split into a first and a last part is therefore random, and
    the same on every machine.

    Raises:
        RunError: nothing readable is there, or it is not text.
    """
    root = Path(data) if data else Path(sysconfig.get_paths()["stdlib"])
    wanted = str(root) if data else f"the Python standard library at {root}"
    remedy = "name a text file or a folder of text"
    if not root.exists():
        raise RunError(f"{wanted} does not exist; {remedy}")
    if root.is_file():
        if not _is_text(root):
            raise RunError(f"{wanted} cannot be read, is empty, or is no text (it has zero bytes); {remedy}")
        return Source(root, (_entry(root, root.name),))
    paths = list(_walk(root, sources_only=data is None))
    files = [_entry(path, path.relative_to(root).as_posix()) for path in paths if _is_text(path)]
    skipped = len(paths) - len(files)
    if not files:
        raise RunError(f"{wanted} holds no readable text ({skipped} other files); {remedy}")
    return Source(root, tuple(sorted(files, key=lambda entry: digest(entry[0]))), skipped)


def _walk(root: Path, sources_only: bool) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [
            f for f in folders if not f.startswith(".") and not (sources_only and f in _NOT_SOURCES)
        ]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and (not sources_only or name.endswith(".py")) and path.is_file():
                yield path


def _is_text(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            head = file.read(_SNIFFED)
    except OSError:
        return False
    return bool(head) and b"\0" not in head


def _entry(path: Path, name: str) -> tuple[str, int, int]:
    status = path.stat()
    return name, status.st_size, status.st_mtime_ns


def digest(text: str) -> str:
    """Return a short name for a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def check_size(split: str, sequence_length: int, tokens: int, counted: bool = True) -> None:
    """Check that the tokens make a sequence on either side of the split.

    Args:
        split: weights of training and held-out data, separated by commas.
        sequence_length: tokens per sequence.
        tokens: number of tokens, an upper bound unless ``counted``.
        counted: whether ``tokens`` is exact.

    Raises:
        RunError: there are too few tokens.
    """
    weights = [float(part) for part in split.split(",")][:2]
    share = min(weight / sum(weights) for weight in weights if weight)
    # A sequence needs one more token, the label of its last position.
    if tokens * share < 2 * (sequence_length + 1):
        raise RunError(
            f"the data has {'' if counted else 'no more than '}{tokens} tokens; a part of {share:.1%} of "
            f"them (--split {split}) is too little for sequences of {sequence_length}; use more "
            "text, a shorter --seq-length or another --split"
        )


def build(source: Source, tokenizer: Tokenizer, cache: Path, megatron: Megatron | None = None) -> Corpus:
    """Return the indexed file of this text, from the cache if it is there; one process builds, others wait.

    Args:
        source: result of :func:`find_text`.
        tokenizer: tokenizer that makes the ids.
        cache: folder of indexed files, which jobs may share.
        megatron: Megatron whose ``IndexedDatasetBuilder`` writes the file; default: ``megatron.core``.

    Raises:
        RunError: the text cannot be indexed.
    """
    # Names, sizes and times of the files are in the key, so that changed text gets another folder.
    key = digest(json.dumps([FORMAT, tokenizer.identity, str(source.root.resolve()), source.files]))
    folder = cache / key
    facts = folder / "corpus.json"
    cache.mkdir(parents=True, exist_ok=True)
    with lock(cache / ".lock"):
        if not facts.exists():
            # The folder gets its name when it is complete: a killed process leaves no valid folder.
            unfinished = cache / f"{key}.partial"
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.mkdir()
            statistics = _write(source, tokenizer, unfinished, megatron or Megatron())
            write_atomically(unfinished / facts.name, json.dumps(statistics, indent=1))
            os.rename(unfinished, folder)
    try:
        return Corpus(prefix=str(folder / "corpus"), **json.loads(facts.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise RunError(
            f"{facts} is damaged ({error}); delete its folder, and the next run indexes the text again"
        ) from error


def _write(source: Source, tokenizer: Tokenizer, folder: Path, megatron: Megatron) -> dict[str, float]:
    indexed_dataset = megatron("core.datasets.indexed_dataset")
    builder = indexed_dataset.IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=tokenizer.dtype)
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    documents = text_bytes = 0
    for text in _documents(source):
        # Ids of one document with its end marker: [length + 1]
        ids = np.append(tokenizer.encode(text), tokenizer.eod)
        builder.add_document(ids, [len(ids)])
        counts += np.bincount(ids, minlength=tokenizer.vocab_size)
        documents += 1
        text_bytes += len(text)
    builder.finalize(str(folder / "corpus.idx"))
    if not documents:
        raise RunError(f"{source.root} holds no readable text; name another text file or folder")
    tokens = int(counts.sum())
    facts = {"documents": documents, "tokens": tokens, "text_bytes": text_bytes}
    return {**facts, "unigram_entropy": entropy(counts)}


def entropy(counts: npt.NDArray[Any]) -> float:
    """Return the entropy in nats of a distribution given by counts."""
    probability = counts[counts > 0] / counts.sum()
    return float(-(probability * np.log(probability)).sum())


def _documents(source: Source) -> Iterator[bytes]:
    """Yield one document per file; a few large files are cut at line ends, to have held-out documents.

    Raises:
        RunError: listed files can no longer be read. Without them the cache would lack text for all later
            jobs.
    """
    # At least 40 documents: 3 files are cut into 14 pieces each.
    pieces = -(-FEWEST_DOCUMENTS // len(source.files))
    failures: list[OSError] = []
    for name, size, _ in source.files:
        try:
            text = source.path(name).read_bytes()
        except OSError as error:
            failures.append(error)
            continue
        if failures or b"\0" in text:  # zero bytes after the part that was checked before
            continue
        yield from cut(text, -(-size // pieces)) if pieces > 1 else ([text] if text else [])
    if failures:
        raise RunError(
            f"{len(failures)} of {len(source.files)} text files below {source.root} cannot be read, first "
            f"{failures[0].filename} ({failures[0].strerror}); nothing was indexed: start again, and the "
            "text is listed anew, or name other text"
        )


def cut(text: bytes, length: int) -> Iterator[bytes]:
    """Yield pieces of about ``length`` bytes, which end at a line end if there is one before twice that."""
    start = 0
    while start < len(text):
        stop = start + max(length, 1)
        line_end = text.find(b"\n", stop - 1, start + 2 * length)
        stop = line_end + 1 if line_end >= 0 else stop
        yield text[start:stop]
        start = stop
