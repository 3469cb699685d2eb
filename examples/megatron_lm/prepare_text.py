"""Turn a folder of text files into the input of Megatron-LM's ``tools/preprocess_data.py``.

    python prepare_text.py FOLDER OUTPUT

writes ``OUTPUT/text.jsonl``, one document a line, and a byte-level BPE tokenizer trained on it
(``vocab.json``, ``merges.txt``), so that nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

END = "<|endoftext|>"
"""End-of-document token by the name that Megatron's GPT2BPETokenizer expects."""


def main() -> int:
    """Write the three files; return exit status 1 if there is no text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="read all files below it that match --pattern")
    parser.add_argument("output", type=Path, help="folder to write to")
    parser.add_argument("--pattern", default="*.py", help="which files (default: %(default)s)")
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="stop after so much text")
    parser.add_argument("--vocab-size", type=int, default=1024, help="tokens of the tokenizer")
    args = parser.parse_args()
    texts = list(documents(args.folder, args.pattern, args.max_bytes))
    if not texts:
        print(f"prepare_text.py: no text in {args.folder}/**/{args.pattern}", file=sys.stderr)
        return 1
    args.output.mkdir(parents=True, exist_ok=True)
    with open(args.output / "text.jsonl", "w", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=args.vocab_size, special_tokens=[END], show_progress=False
    )
    tokenizer.save_model(str(args.output))
    print(f"{len(texts)} documents, {sum(map(len, texts)):,} characters in {args.output}")
    return 0


def documents(folder: Path, pattern: str, max_bytes: int) -> Iterator[str]:
    """Yield the texts of the files, in the order of their names, until there is enough."""
    total = 0
    for path in sorted(folder.rglob(pattern)):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a broken link, or no text
        total += len(text.encode())
        if total > max_bytes:
            return
        if text.strip():
            yield text


if __name__ == "__main__":
    sys.exit(main())
