"""Text on disk to Megatron's indexed file, built once and kept in a cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dsa_job.errors import UsageError
from dsa_job.files import file_lock, write_atomically
from dsa_job.tokenizer import Tokenizer

FORMAT = 1  # raise when the same text would be indexed differently
FEWEST_DOCUMENTS = 40
_SNIFFED = 8192
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """The text files that make a corpus.

    Attributes:
        root: what the user named.
        files: path below the root, size in bytes and time of change in nanoseconds, in the order in
            which documents are written.
        skipped: files that are no text.
    """

    root: Path
    files: tuple[tuple[str, int, int], ...]
    skipped: int = 0

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(size for _, size, _ in self.files)

    def path(self, name: str) -> Path:
        """Where the file of that name lies."""
        return self.root / name if self.root.is_dir() else self.root


@dataclass(frozen=True)
class Corpus:
    """An indexed file and what is known of it.

    Attributes:
        prefix: path of the ``.bin`` and ``.idx`` files without that ending.
        documents, tokens: how many.
        text_bytes: bytes of the text.
        unigram_entropy: entropy of single tokens in nats; the loss of a model that knows nothing but
            how often each token occurs.
    """

    prefix: str
    documents: int
    tokens: int
    text_bytes: int
    unigram_entropy: float


def find_text(data: str | None) -> Source:
    """List the text below a file or folder; by default the Python standard library's sources.

    Files are ordered by a hash of their name, so that a split into a first and a last part is one by
    chance, and the same on every machine.

    Raises:
        UsageError: nothing readable is there, or it is no text.
    """
    root = Path(data) if data else Path(sysconfig.get_paths()["stdlib"])
    wanted = f"--data {root}" if data else f"the Python standard library at {root}"
    remedy = "name a text file or a folder of text with --data"
    if not root.exists():
        raise UsageError(f"{wanted} does not exist; {remedy}")
    if root.is_file():
        if not _is_text(root):
            raise UsageError(
                f"{wanted} cannot be read, is empty, or is no text (it holds zero bytes); {remedy}"
            )
        return Source(root, (_entry(root, root.name),))
    files, skipped = [], 0
    for path in _walk(root, sources_only=data is None):
        if _is_text(path):
            files.append(_entry(path, path.relative_to(root).as_posix()))
        else:
            skipped += 1
    if not files:
        raise UsageError(f"{wanted} holds no readable text ({skipped} other files); {remedy}")
    return Source(root, tuple(sorted(files, key=lambda entry: _hash(entry[0]))), skipped)


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


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def check_size(split: str, sequence_length: int, tokens: int, counted: bool = True) -> None:
    """Whether so many tokens make at least one sequence on either side of the split.

    Args:
        split: weights of the sides, with commas.
        sequence_length: tokens per sequence.
        tokens: how many there are, or can be at most.
        counted: whether ``tokens`` was counted, and is no upper bound.

    Raises:
        UsageError: they do not.
    """
    weights = [float(part) for part in split.split(",")]
    share = min(weight / sum(weights) for weight in weights if weight)
    if tokens * share < 2 * (sequence_length + 1):
        raise UsageError(
            f"the data has {'' if counted else 'no more than '}{tokens} tokens; a part of {share:.1%} of "
            f"them (--split {split}) is too little for sequences of {sequence_length}; use more "
            "text, a shorter --seq-length or another --split"
        )


def build(source: Source, tokenizer: Tokenizer, cache: Path) -> Corpus:
    """The indexed file of this text, from the cache if it is there; one process builds, others wait.

    Raises:
        UsageError: the text cannot be indexed.
    """
    key = _hash(json.dumps([FORMAT, tokenizer.identity, str(source.root.resolve()), source.files]))
    folder = cache / key
    cache.mkdir(parents=True, exist_ok=True)
    with file_lock(cache / ".lock"):
        if not (folder / "corpus.json").exists():
            # What a killed process left half written is never taken for a corpus: the folder gets its
            # name when everything is in it.
            unfinished = cache / f"{key}.partial"
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.mkdir()
            facts = _write(source, tokenizer, unfinished)
            write_atomically(unfinished / "corpus.json", json.dumps(facts, indent=1))
            os.rename(unfinished, folder)
    return _read(folder)


def _read(folder: Path) -> Corpus:
    facts = folder / "corpus.json"
    try:
        return Corpus(prefix=str(folder / "corpus"), **json.loads(facts.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{facts} is damaged ({error}); delete its folder, and the next run indexes the text again"
        ) from error


def _write(source: Source, tokenizer: Tokenizer, folder: Path) -> dict[str, float]:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=tokenizer.dtype)
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
        raise UsageError(f"{source.root} holds no readable text; name a text file or folder with --data")
    return {
        "documents": documents,
        "tokens": int(counts.sum()),
        "text_bytes": text_bytes,
        "unigram_entropy": entropy(counts),
    }


def entropy(counts: np.ndarray) -> float:
    """Entropy in nats of what occurs so often."""
    probability = counts[counts > 0] / counts.sum()
    return float(-(probability * np.log(probability)).sum())


def _documents(source: Source) -> Iterator[bytes]:
    """One document per file; few files are cut at line ends, so that there is something to hold out."""
    pieces = -(-FEWEST_DOCUMENTS // len(source.files))
    for name, size, _ in source.files:
        with contextlib.suppress(OSError):  # gone since the list was made
            text = source.path(name).read_bytes()
            if b"\0" in text:  # further in than the first look went
                continue
            yield from cut(text, -(-size // pieces)) if pieces > 1 else ([text] if text else [])


def cut(text: bytes, length: int) -> Iterator[bytes]:
    """Pieces of about ``length`` bytes, each ending where a line ends if one does before twice that."""
    start = 0
    while start < len(text):
        stop = start + max(length, 1)
        line_end = text.find(b"\n", stop - 1, start + 2 * length)
        stop = line_end + 1 if line_end >= 0 else stop
        yield text[start:stop]
        start = stop


def describe(corpus: Corpus) -> str:
    """One line for the user."""
    facts = asdict(corpus)
    return (
        "{text_bytes:,} bytes of text, {documents:,} documents, {tokens:,} tokens; unigram entropy "
        "{unigram_entropy:.4f} nats per token".format(**facts)
    )
