from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dsa_job.tokenizers import ByteTokenizer, FileTokenizer, build_tokenizer

from mindspeed_dsa.runs.files import RunError

tokenizers = pytest.importorskip("tokenizers")


def test_bytes_are_their_own_ids() -> None:
    tokenizer = build_tokenizer(None)
    assert isinstance(tokenizer, ByteTokenizer)
    text = "naïve text\n".encode()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert bytes(ids.tolist()) == text
    # Text has no zero byte, so the end of a document is unambiguous.
    assert tokenizer.eod == 0
    assert tokenizer.eod not in ids
    assert tokenizer.vocab_size == 256
    assert tokenizer.dtype is np.uint16


def word_tokenizer(path: Path, *special: str) -> Path:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "one": 1, "two": 2}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(special))
    backend.save(str(path))
    return path


def test_a_hugging_face_file_brings_its_end_of_document(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(str(word_tokenizer(tmp_path / "tokenizer.json", "[PAD]", "</s>")))
    assert tokenizer.encode(b"two one two three").tolist() == [2, 1, 2, 0]
    assert tokenizer.eod == 4
    assert tokenizer.vocab_size == 5


def test_a_hugging_face_file_without_one_gets_one(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(word_tokenizer(tmp_path / "tokenizer.json"))
    assert (tokenizer.eod, tokenizer.vocab_size) == (3, 4)


def test_two_files_have_two_identities(tmp_path: Path) -> None:
    first = FileTokenizer(word_tokenizer(tmp_path / "a.json"))
    same = FileTokenizer(word_tokenizer(tmp_path / "b.json"))
    other = FileTokenizer(word_tokenizer(tmp_path / "c.json", "</s>"))
    assert first.identity == same.identity != other.identity
    assert first.identity != ByteTokenizer().identity


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}', "not json"])
def test_a_broken_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(RunError, match=r"is not a tokenizer\.json of the tokenizers package"):
        build_tokenizer(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"No such file or directory; name a tokenizer\.json"):
        build_tokenizer(str(tmp_path / "tokenizer.json"))
