"""Initial weights of all runs: are they the same, and on what evidence?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Digests = dict[str, dict[str, Any]]
"""``"rank 0: decoder.layers.0..."`` to ``{"sha256", "dtype", "shape"}``."""


def of_run(folder: Path) -> Digests:
    """Return what the feature initial-weights wrote into a run's folder; empty if it wrote nothing.

    Raises:
        ValueError: a file is damaged.
    """
    found: Digests = {}
    for file in sorted(folder.glob("weights-rank*.json")):
        try:
            content = json.loads(file.read_bytes())
            for name, digest in content["parameters"].items():
                _form(digest)
                found[f"rank {content['rank']}: {name}"] = digest
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} holds no digests of weights ({error!r}); compare again") from None
    return found


def of_files(folder: Path) -> str:
    """One SHA-256 over names and contents of all files below a folder."""
    sha = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        sha.update(f"{path.relative_to(folder)} {content}\n".encode())
    return sha.hexdigest()


def compare(runs: Mapping[str, Digests], checkpoint: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Compare every run with the first.

    Args:
        runs: digests by the run's name, in the order of the runs.
        checkpoint: ``{"folder", "unchanged"}`` of the initial weights that all runs loaded.

    Returns:
        ``same`` (``None``: not known) and ``how``, in words.
    """
    names = list(runs)
    if len(names) < 2:
        return {"same": None, "how": "not verified: there are not two runs"}
    first, reference = names[0], runs[names[0]]
    silent = [name for name in names if not runs[name]]
    if silent:
        return {
            "same": None,
            "how": f"not verified: {', '.join(silent)} wrote no digests; does the job import "
            "mindspeed_dsa.megatron_adaptor, and train through Megatron-core's schedules?",
        }
    loaded = f"all runs loaded {checkpoint['folder']}" if checkpoint and checkpoint["unchanged"] else ""
    remarks = []
    for name in names[1:]:
        shared = reference.keys() & runs[name].keys()
        alike = [key for key in shared if _form(reference[key]) == _form(runs[name][key])]
        differing = sorted(key for key in alike if reference[key] != runs[name][key])
        if differing:
            return {
                "same": False,
                "how": f"{len(differing)} of {len(alike)} weights differ between {first} and {name} before "
                f"the first step, e.g. {differing[0]}",
            }
        if not alike or len(alike) < len(shared):
            # Another dtype, or sharded differently: digests cannot be compared.
            how = f"parameters of {first} and {name} differ in dtype or in sharding"
            return {"same": True if loaded else None, "how": f"{loaded or 'not verified'}; {how}"}
        extra = len(reference.keys() ^ runs[name].keys())
        if extra:
            remarks.append(f"{extra} parameters exist in only one of {first} and {name}")
    how = f"SHA-256 of all {len(reference)} parameters, taken in each run before its first step, are equal"
    return {"same": True, "how": "; ".join(filter(None, [how, loaded, *dict.fromkeys(remarks)]))}


def _form(digest: Mapping[str, Any]) -> tuple[Any, Any]:
    return digest["dtype"], tuple(digest["shape"])
