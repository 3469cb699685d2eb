"""Files beside the weights of a model that another one is to be like: data alone, of its own folder.

The folder may come from anywhere. A link in it that leads to another place would have a file of this machine
published with the trained model, so it is refused by name. Hugging Face's cache is made of links as well:
each file of ``snapshots/REVISION`` or of a folder in it is one into ``blobs`` beside ``snapshots``, and these
are its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from mindspeed_dsa.features.checkpoints.hugging_face.config import FILE, INDEX
from mindspeed_dsa.runs.files import RunError

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
    "*.txt",
)
"""Files that are copied: no code."""
_WEIGHTS = (INDEX, "*.safetensors")


def copy(folder: Path, into: Path) -> None:
    """Copy the files beside a model's weights.

    Raises:
        RunError: one of them is a link that leads out of the folder.
    """
    for path in _matching(folder, _COPIED):
        if leads := _leads_out(folder, path):
            raise RunError(f"mindspeed_dsa weights: {leads}")
        shutil.copyfile(path.resolve(), into / path.name)


def require_own(folder: Path, who: str, weights: bool = False) -> None:
    """Refuse a folder of which something that is read would be another folder's.

    Args:
        folder: the model's folder.
        who: speaks if it fails.
        weights: look at the weights' files as well, of which nothing but types and factors is published.

    Raises:
        RunError: the message names every link that leads out of the folder.
    """
    if found := list(problems(folder, weights)):
        raise RunError(f"{who}: {'; '.join(found)}")


def problems(folder: Path, weights: bool = False) -> Iterator[str]:
    """Yield a sentence for each link that leads out of the folder."""
    for path in _matching(folder, (FILE, *_COPIED, *(_WEIGHTS if weights else ()))):
        if leads := _leads_out(folder, path):
            yield leads


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file() and path.suffix != ".py")


def _leads_out(folder: Path, path: Path) -> str:
    """Return in words that a file is elsewhere; nothing where it is in the folder or in its cache's blobs."""
    own, target = [folder.resolve()], path.resolve()
    snapshots = next((parent for parent in own[0].parents if parent.name == "snapshots"), None)
    if snapshots is not None and not (blobs := snapshots.parent / "blobs").is_symlink():
        own.append(blobs)
    if any(target.is_relative_to(each) for each in own):
        return ""
    return (
        f"{path} is a link to {target}, outside of that folder, and is not followed; put the file itself "
        "there, or name the folder that it is in"
    )
