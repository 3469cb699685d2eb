"""The table of families holds every model of the installed transformers that has an indexer.

transformers' sources are parsed, not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from mindspeed_dsa.integrations.transformers.families import FAMILIES, MISSING
from tests.hosts.transformers.models import in_release


def models() -> Path:
    """Return the folder of transformers' models."""
    try:
        return Path(str(distribution("transformers").locate_file("transformers/models")))
    except PackageNotFoundError:
        pytest.skip("transformers is not installed")


def classes(source: str) -> list[ast.ClassDef]:
    """Return the classes at the top level of a module."""
    return [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def types(source: str) -> Iterator[str]:
    """Yield each ``model_type`` of a configuration module, except for towers beside a text model."""
    found, towers = {}, set()
    for definition in classes(source):
        for node in definition.body:
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            name, value = node.targets[0].id, node.value
            if name == "model_type" and isinstance(value, ast.Constant):
                found[definition.name] = str(value.value)
            # Older releases say "sub_configs".
            if name in ("sub_configs", "sub_configs_defaults") and isinstance(value, ast.Dict):
                parts = zip(value.keys, value.values, strict=True)
                towers |= {ast.unparse(part) for key, part in parts if ast.unparse(key) != "'text_config'"}
    yield from (kind for name, kind in found.items() if name not in towers)


def with_indexers(folder: Path) -> set[str]:
    """Return the model types whose modeling module defines an indexer."""
    found: set[str] = set()
    for module in folder.glob("*/modeling_*.py"):
        source = module.read_text(encoding="utf-8")
        if "Indexer" not in source or not any(x.name.endswith("Indexer") for x in classes(source)):
            continue
        configuration = module.with_name(module.name.replace("modeling", "configuration"))
        found |= set(types(configuration.read_text(encoding="utf-8")))
    return found


def test_every_model_with_an_indexer_is_served_or_refused_with_its_reason():
    found = with_indexers(models())
    assert sorted(found - set(FAMILIES) - set(MISSING)) == []
    served = {kind for kind, family in FAMILIES.items() if in_release(family.module.partition(".")[0])}
    assert sorted(served - found) == []


def test_a_new_model_would_be_found(tmp_path):
    folder = tmp_path / "newest"
    folder.mkdir()
    (folder / "modeling_newest.py").write_text("class NewestTextFastIndexer:\n    pass\n")
    (folder / "configuration_newest.py").write_text(
        "class TowerConfig:\n    model_type = 'newest_vision'\n"
        "class TextConfig:\n    model_type = 'newest_text'\n"
        "class NewestConfig:\n    model_type = 'newest'\n"
        "    sub_configs = {'vision_config': TowerConfig, 'text_config': TextConfig}\n"
    )
    assert with_indexers(tmp_path) == {"newest", "newest_text"}
