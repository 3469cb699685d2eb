from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from dsa_job import text as corpus
from dsa_job.tokenizers import ByteTokenizer

from mindspeed_dsa.runs.files import RunError


def names(source: corpus.Source) -> list[str]:
    return [name for name, _, _ in source.files]


@pytest.mark.full
def test_the_default_is_the_standard_library() -> None:
    source = corpus.find_text(None)
    assert {"argparse.py", "json/decoder.py"} <= set(names(source))
    assert all(name.endswith(".py") for name in names(source))
    assert not any("site-packages" in name or "__pycache__" in name for name in names(source))
    assert source.size > 3_000_000


def test_a_folder_gives_its_text_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("bb")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("no")
    source = corpus.find_text(str(tmp_path))
    assert sorted(names(source)) == ["a.txt", "deep/b.md"]
    assert source.skipped == 2
    assert source.size == 3


def test_the_order_of_documents_does_not_follow_names(tmp_path: Path) -> None:
    for number in range(64):
        (tmp_path / f"{number:02}").write_text("x")
    order = names(corpus.find_text(str(tmp_path)))
    assert order != sorted(order)
    # The last quarter, which would be held out, comes from all over.
    assert min(map(int, order[48:])) < 16
    assert max(map(int, order[48:])) >= 48


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), (b"", "is no text"), (b"a\0b", "has zero bytes")]
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "data"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunError, match=f"data .*{message}.*; name a text file or a folder of text"):
        corpus.find_text(str(path))


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\0" * 10)
    with pytest.raises(RunError, match=r"holds no readable text \(1 other files\)"):
        corpus.find_text(str(tmp_path))


def test_a_file_is_cut_at_line_ends_into_documents() -> None:
    text = b"".join(b"line %d\n" % number for number in range(100)) + b"the end"
    pieces = list(corpus.cut(text, 50))
    assert b"".join(pieces) == text
    assert len(pieces) > 10
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    assert max(map(len, pieces)) < 100


def test_a_line_without_end_is_cut_all_the_same() -> None:
    assert [len(piece) for piece in corpus.cut(b"x" * 100, 30)] == [30, 30, 30, 10]


def test_entropy_in_nats() -> None:
    assert corpus.entropy(np.array([5, 0, 5, 5, 5])) == pytest.approx(math.log(4))
    assert corpus.entropy(np.array([7, 0])) == 0


def test_the_indexed_file_holds_every_document(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    texts = {f"{number:02}.txt": f"document {number}\n" * (number + 1) for number in range(50)}
    (tmp_path / "text").mkdir()
    for name, text in texts.items():
        (tmp_path / "text" / name).write_text(text)
    source = corpus.find_text(str(tmp_path / "text"))
    built = corpus.build(source, ByteTokenizer(), tmp_path / "cache")
    assert built.documents == 50
    assert built.text_bytes == source.size
    assert built.tokens == source.size + 50
    dataset = IndexedDataset(built.prefix)
    for index, name in enumerate(names(source)):
        ids = dataset[index]
        assert bytes(ids[:-1].tolist()).decode() == texts[name]
        assert ids[-1] == 0
    counts = np.bincount(np.concatenate([dataset[index] for index in range(50)]))
    assert built.unigram_entropy == pytest.approx(corpus.entropy(counts))


def test_the_cache_is_used_until_the_text_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one line\n" * 100)
    cache = tmp_path / "cache"
    first = corpus.build(corpus.find_text(str(path)), ByteTokenizer(), cache)
    assert first.documents >= 20  # one file, yet something can be held out

    def must_not_run(*args: object) -> None:
        raise AssertionError("built again")

    with monkeypatch.context() as patched:
        patched.setattr(corpus, "_write", must_not_run)
        assert corpus.build(corpus.find_text(str(path)), ByteTokenizer(), cache) == first
    path.write_text("another line\n" * 100)
    changed = corpus.build(corpus.find_text(str(path)), ByteTokenizer(), cache)
    assert changed.prefix != first.prefix
    assert changed.text_bytes == 1300


def test_a_half_written_cache_is_not_taken_for_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one line\n" * 100)
    source, cache = corpus.find_text(str(path)), tmp_path / "cache"

    def break_off(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(corpus, "write_atomically", break_off)
        with pytest.raises(KeyboardInterrupt):
            corpus.build(source, ByteTokenizer(), cache)
    assert not [
        name for name in os.listdir(cache) if not name.startswith(".") and not name.endswith(".partial")
    ]
    built = corpus.build(source, ByteTokenizer(), cache)
    assert built.text_bytes == 900
    assert os.listdir(cache).count(Path(built.prefix).parent.name) == 1
    assert not list(cache.glob("*.partial"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"{}", b'{"more": 1}'], ids=repr)
def test_a_damaged_cache_names_the_file_and_the_way_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text").write_text("a line\n" * 50)
    source, cache = corpus.find_text(str(tmp_path / "text")), tmp_path / "cache"
    built = corpus.build(source, ByteTokenizer(), cache)
    (facts,) = cache.glob("*/corpus.json")
    facts.write_bytes(content)
    with pytest.raises(RunError, match=f"{facts} is damaged .*; delete its folder, and the next run indexes"):
        corpus.build(source, ByteTokenizer(), cache)
    shutil.rmtree(facts.parent)
    assert corpus.build(source, ByteTokenizer(), cache) == built


def test_a_size_that_was_counted_is_called_so() -> None:
    with pytest.raises(RunError, match=r"^the data has 99 tokens; a part of 5.0%"):
        corpus.check_size("95,5", 32, 99)
    with pytest.raises(RunError, match=r"^the data has no more than 99 tokens; a part of 5.0%"):
        corpus.check_size("95,5", 32, 99, counted=False)


def test_a_text_that_cannot_be_read_is_an_error_and_leaves_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all later jobs would take the rest of the text for the whole."""
    pytest.importorskip("megatron.core")
    folder, cache = tmp_path / "text", tmp_path / "cache"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"text {number}\n" * 9)
    source = corpus.find_text(str(folder))
    read = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name in ("1.txt", "2.txt"):
            raise OSError(5, "Input/output error", str(path))
        return read(path)

    with monkeypatch.context() as once:
        once.setattr(Path, "read_bytes", failing)
        with pytest.raises(
            RunError, match=r"2 of 3 text files below .*text cannot be read, first .*[12]\.txt"
        ):
            corpus.build(source, ByteTokenizer(), cache)
    assert corpus.build(source, ByteTokenizer(), cache).text_bytes == source.size
