"""Text to token ids: bytes by default, or a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from pathlib import Path

import numpy as np

from dsa_job.errors import UsageError

END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
    "<eos>",
    "[SEP]",
)


class Tokenizer(ABC):
    """What the corpus and Megatron's data sets ask of a tokenizer.

    Attributes:
        vocab_size: number of ids, the end-of-document id included.
        eod: id that ends every document.
        unique_identifiers: what Megatron's data sets hash into the name of their index files.
    """

    vocab_size: int
    eod: int
    unique_identifiers: OrderedDict[str, str]

    @property
    def dtype(self) -> type[np.integer]:
        """Smallest type of Megatron's indexed files that holds every id."""
        # Megatron expects uint16 up to this size, and int32 beyond.
        return np.uint16 if self.vocab_size <= np.iinfo(np.uint16).max + 1 else np.int32

    @property
    def identity(self) -> str:
        """Names this tokenizer among all others."""
        return "|".join(f"{key}={value}" for key, value in self.unique_identifiers.items())

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """Ids of one document without the end-of-document id, int64 ``[length]``."""


class ByteTokenizer(Tokenizer):
    """One id per byte. Byte 0, which no text holds, ends a document."""

    vocab_size = 256
    eod = 0

    def __init__(self) -> None:
        self.unique_identifiers = OrderedDict({"class": "ByteTokenizer"})

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


class FileTokenizer(Tokenizer):
    """A Hugging Face ``tokenizer.json``, read with the `tokenizers` package.

    The file's own end-of-text token ends documents; a file without one gets ``<|endoftext|>`` added.

    Args:
        path: the file.

    Raises:
        UsageError: the file is missing or no tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        from tokenizers import Tokenizer as Backend

        self.path = Path(path)
        try:
            content = self.path.read_bytes()
            self._backend = Backend.from_buffer(content)
        except OSError as error:
            raise UsageError(
                f"--tokenizer-model {path}: {error.strerror or error}; name a tokenizer.json"
            ) from error
        except Exception as error:  # the package raises plain Exception for a malformed file
            raise UsageError(
                f"--tokenizer-model {path} is no tokenizer.json of the tokenizers package ({error}); "
                "name another file, or drop the flag to train on bytes"
            ) from error
        self.eod = self._end_of_document()
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        digest = hashlib.blake2b(content, digest_size=12).hexdigest()
        self.unique_identifiers = OrderedDict({"class": "FileTokenizer", "content": digest})

    def _end_of_document(self) -> int:
        for name in END_OF_DOCUMENT_NAMES:
            found = self._backend.token_to_id(name)
            if found is not None:
                return int(found)
        self._backend.add_special_tokens([END_OF_DOCUMENT_NAMES[0]])
        return int(self._backend.token_to_id(END_OF_DOCUMENT_NAMES[0]))

    def encode(self, text: bytes) -> np.ndarray:
        encoded = self._backend.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=np.int64)


def build_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer that ``--tokenizer-model`` asks for; bytes without it."""
    return FileTokenizer(path) if path else ByteTokenizer()
