"""Text to token ids: bytes by default, or a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mindspeed_dsa.runs.files import RunError

_END_OF_DOCUMENT = (
    *("<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("</s>", "<eos>", "[SEP]"),
)


class Tokenizer(ABC):
    """Interface of a tokenizer for the corpus and Megatron's data sets.

    Attributes:
        vocab_size: number of ids, the end-of-document id included.
        eod: id that ends every document.
        unique_identifiers: strings that Megatron's data sets hash into the name of their index files.
    """

    vocab_size: int
    eod: int
    unique_identifiers: OrderedDict[str, str]

    @property
    def dtype(self) -> type[np.integer[Any]]:
        """dtype of ids that Megatron's data sets expect for this vocabulary in an indexed file."""
        return np.uint16 if self.vocab_size <= np.iinfo(np.uint16).max + 1 else np.int32

    @property
    def identity(self) -> str:
        """String that distinguishes this tokenizer from all others."""
        return "|".join(f"{key}={value}" for key, value in self.unique_identifiers.items())

    @abstractmethod
    def encode(self, text: bytes) -> npt.NDArray[Any]:
        """Return the ids of one document without the end-of-document id, int64 ``[length]``."""


class ByteTokenizer(Tokenizer):
    """Tokenizer with one id per byte. Byte 0, which no text contains, ends a document."""

    vocab_size = 256
    eod = 0

    def __init__(self) -> None:
        self.unique_identifiers = OrderedDict({"class": "ByteTokenizer"})

    def encode(self, text: bytes) -> npt.NDArray[Any]:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


class FileTokenizer(Tokenizer):
    """A Hugging Face ``tokenizer.json``, read with the `tokenizers` package.

    The file's own end-of-text token ends documents; a file without one gets ``<|endoftext|>`` added.

    Raises:
        RunError: the file is missing or not a tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            content = Path(path).read_bytes()
            self._backend = Backend.from_buffer(content)
        except OSError as error:
            raise RunError(f"tokenizer {path}: {error.strerror or error}; name a tokenizer.json") from error
        except Exception as error:  # the package raises plain Exception for a malformed file
            raise RunError(
                f"{path} is not a tokenizer.json of the tokenizers package ({error}); name another file, or "
                "none to train on bytes"
            ) from error
        ids = self._backend.get_vocab(with_added_tokens=True)
        if not ids.keys() & set(_END_OF_DOCUMENT):
            self._backend.add_special_tokens([_END_OF_DOCUMENT[0]])
            ids = self._backend.get_vocab(with_added_tokens=True)
        self.eod = next(ids[name] for name in _END_OF_DOCUMENT if name in ids)
        self.vocab_size = max(ids.values()) + 1
        digest = hashlib.blake2b(content, digest_size=12).hexdigest()
        self.unique_identifiers = OrderedDict({"class": "FileTokenizer", "content": digest})

    def encode(self, text: bytes) -> npt.NDArray[Any]:
        encoded = self._backend.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=np.int64)


def build_tokenizer(path: str | None) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``; without a path the byte tokenizer."""
    return FileTokenizer(path) if path else ByteTokenizer()
