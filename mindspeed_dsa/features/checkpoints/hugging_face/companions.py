"""Files next to the weights of a reference model, such as the tokenizer, copied to an exported model.

The reference folder may come from anywhere. A symbolic link in it could publish a file of this machine with
the trained model, so links that leave the folder are refused by name. Hugging Face's cache consists of links
as well: files in ``snapshots/REVISION`` and its subfolders link into ``blobs`` next to ``snapshots``. These
are allowed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_dsa.features.checkpoints.hugging_face.config import FILE, INDEX
from mindspeed_dsa.features.checkpoints.hugging_face.written_config import TOKENS
from mindspeed_dsa.runs.files import RunError

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
    "*.txt",
)
"""Patterns of files to copy; code is never copied."""
_WEIGHTS = (INDEX, "*.safetensors")


def copy(folder: Path, into: Path) -> None:
    """Copy the tokenizer and other files next to a model's weights to the folder ``into``.

    Raises:
        RunError: a file is a link that leaves the folder.
    """
    for path in _matching(folder, _COPIED):
        if leads := _leads_out(folder, path):
            raise RunError(f"mindspeed_dsa weights: {leads}")
        shutil.copyfile(path.resolve(), into / path.name)


def notes(folder: Path) -> list[str]:
    """Return a sentence if the folder's tokenizer needs code, which is never copied."""
    code = dict(read(folder / "tokenizer_config.json").get("auto_map") or {})
    return [f"the tokenizer needs code that is not copied: take the *.py files of {folder}"] if code else []


def require_own(folder: Path, who: str, weights: bool = False) -> None:
    """Refuse a folder if a file to be read is a link to another folder.

    Args:
        folder: folder of the model.
        who: prefix of the error message.
        weights: whether to check the weight files too, although only dtypes and factors are taken from them.

    Raises:
        RunError: links leave the folder; the message names all of them.
    """
    if found := list(problems(folder, weights)):
        raise RunError(f"{who}: {'; '.join(found)}")


def problems(folder: Path, weights: bool = False) -> Iterator[str]:
    """Yield a message for each link that leaves the folder."""
    for path in _matching(folder, (FILE, *_COPIED, *(_WEIGHTS if weights else ()))):
        if leads := _leads_out(folder, path):
            yield leads


def token_ids(tokenizer: str | None) -> dict[str, int | list[int] | None]:
    """Return ids of special tokens in a tokenizer's files, by their keys in ``config.json``.

    Args:
        tokenizer: folder or file, as in ``--tokenizer-model``; a name on a hub gives nothing.
    """
    path = Path(tokenizer or "")
    folder = path if path.is_dir() else path.parent
    if not tokenizer or not path.exists():
        return {}
    said, words, content, more = (
        read(folder / name) for name in (FILE, "tokenizer_config.json", "tokenizer.json", "added_tokens.json")
    )
    if any(key in said for key in TOKENS):  # of a model's own folder
        return {key: value for key in TOKENS if _are_ids(value := said.get(key))}
    added = content.get("added_tokens")
    ids = more | {token.get("content"): token.get("id") for token in added or () if isinstance(token, dict)}
    for number, token in dict(words.get("added_tokens_decoder") or {}).items():
        if isinstance(token, dict) and number.isdecimal():
            ids[token.get("content")] = int(number)
    tokens = {key: words.get(key.removesuffix("_id")) for key in TOKENS}
    named = {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}
    return {
        key: ids[token] for key, token in named.items() if isinstance(token, str) and _are_ids(ids.get(token))
    }


def _are_ids(value: object) -> bool:
    return all(type(each) is int for each in value) if isinstance(value, list) else type(value) is int


def read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist or has no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file() and path.suffix != ".py")


def _leads_out(folder: Path, path: Path) -> str:
    """Return a message if the file is outside the folder and its cache's blobs, else an empty string."""
    inside, target = [folder.resolve()], path.resolve()
    snapshots = next((parent for parent in inside[0].parents if parent.name == "snapshots"), None)
    # A `blobs` that is itself a link could lead anywhere.
    if snapshots is not None and not (blobs := snapshots.parent / "blobs").is_symlink():
        inside.append(blobs)
    if any(target.is_relative_to(allowed) for allowed in inside):
        return ""
    return (
        f"{path} is a link to {target}, outside of that folder, and is not followed; put the file itself "
        "there, or name the folder that it is in"
    )
