"""Private names of torch in the package equal the list in docs/design/torch-privates.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import mindspeed_dsa
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.patches import versions
from tests.support.import_graph import Sources
from tests.support.sources import nodes_of

FOLDER = Path(mindspeed_dsa.__file__).parent
PAGE = FOLDER.parent / "docs" / "design" / "torch-privates.md"

NOT_TORCHS = {
    # Python
    *("_current_frames", "_exit", "_getframe"),
    # argparse
    *("_ActionsContainer", "_actions", "_option_string_actions"),
    # named tuples, import specs
    *("_asdict", "_replace", "_initializing"),
    # Triton before 3.9, where it has no underscore
    "_reinterpret",
    # torch_npu
    "_lazy_call",
    # TorchTitan
    *("_combine_token_exchange", "_unpermute"),
    # Megatron and Transformer Engine
    "_GLOBAL_ARGS",
    *("_BaseDataParallel", "_buffer", "_compute_index_scores", "_fork_rng", "_fsdp_modules"),
    *("_forward_attention", "_forward_impl"),
    *("_get_all_rng_states", "_get_kv_up_weights", "_get_model_param_range_map"),
    "_maintain_float32_expert_bias",
    *("_proj_and_transformer_layer", "_prompt_config", "_prompt_format", "_tokenizer"),
    *("_set_all_rng_states", "_set_checkpointing", "_unset_checkpointing"),
    # Megatron-Bridge
    "_adapter_enabled",
    # transformers' configurations and experts
    "_attn_implementation",
    "_experts_implementation",
    "_apply_gate",
    "_is_expert_parallel",
    # attributes that this package gives to foreign objects
    *("_depends_on", "_plain_expert"),
}
"""Private attributes of other packages' objects that the package reads, by owner."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def uses(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the private names of torch in a module: imported, written out, or in an engine string."""
    imported = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    imported[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+(:\w[\w.]*)?", str(node.value)):
            yield str(node.value).replace(":", ".")
    for node in nodes:
        path: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            path.append(inner.attr)
            inner = inner.value
        if path and isinstance(inner, ast.Name) and inner.id in imported:
            yield ".".join([imported[inner.id], *reversed(path)])


def attributes(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield attribute names of any object, also from strings of ``getattr`` and similar calls."""
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            yield from (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))


def defined(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") in ("self", "cls")
        ):
            yield node.attr


@pytest.fixture(scope="module")
def modules(sources: Sources) -> list[list[ast.AST]]:
    return [nodes_of(file) for file in sources.files.values()]


def listed(heading: str) -> list[str]:
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")
    rows = [
        line.split("|")[1] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")
    ]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def covers(entry: str, name: str) -> bool:
    """Return whether a row of the list covers a name: the name itself, or everything below it."""
    entry = entry.removesuffix(".*")
    return name == entry or name.startswith(f"{entry}.")


def unlisted(used: set[str], entries: list[str]) -> set[str]:
    private = {name for name in used if any(is_private(each) for each in name.split("."))}
    parents = {"torch._C"}  # on the way to the names that are listed
    return {name for name in private - parents if not any(covers(entry, name) for entry in entries)}


def test_every_private_name_of_torch_is_listed(modules):
    entries = listed("Names of modules")
    used = {name for nodes in modules for name in uses(nodes)}
    assert unlisted(used, entries) == set()
    used |= {
        f"torch.{space}.{name}"  # by getattr and hasattr
        for nodes in modules
        for name in attributes(nodes)
        for space in ("_C", "ops.mkldnn")
    }
    # Operators are looked up by string before they are called.
    assert [entry for entry in entries if not any(covers(entry, name) for name in used)] == []


def test_every_private_attribute_is_listed_or_another_packages(modules):
    entries = listed("Attributes of objects")
    own_names = {name for nodes in modules for name in defined(nodes)}
    below = {part for entry in listed("Names of modules") for part in entry.split(".")}
    used = {
        name
        for nodes in modules
        for name in attributes(nodes)
        if isinstance(name, str) and is_private(name) and name not in own_names
    }
    assert used - set(entries) - NOT_TORCHS - below == set()
    assert sorted((set(entries) | NOT_TORCHS) - used - own_names) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._new_thing()",
        "from torch._new import thing",
        "import torch.nn._new",
        "from torch import _new as thing",
        "from torch.autograd import graph\ngraph._new()",
        "load('torch._new.module')",
        "private('torch.autograd:_new', 'x')",
    ],
)
def test_a_new_use_is_seen(source):
    assert len(unlisted(set(uses(list(ast.walk(ast.parse(source))))), listed("Names of modules"))) == 1


def test_a_name_that_is_gone_is_reported_with_who_needs_it():
    assert versions.private("torch.autograd:_is_checkpoint_valid", "a test")() in (True, False)
    with pytest.raises(
        ImportError, match=r"has no torch\._C\._gone, which a test needs; use a torch release"
    ):
        versions.private("torch._C:_gone", "a test")
    with pytest.raises(ImportError, match=r"has no torch\._gone\.name, which a test needs"):
        versions.private("torch._gone:name", "a test")


def test_a_dtensor_is_never_its_own_piece(monkeypatch):
    import torch
    from torch.distributed.tensor import DTensor

    plain = torch.ones(2)
    assert local_of(plain) is plain
    sharded = torch.Tensor._make_subclass(DTensor, torch.ones(2))
    sharded._local_tensor = plain
    assert local_of(sharded) is plain
    del sharded._local_tensor  # as if torch had renamed it
    with pytest.raises(AttributeError, match="has no _local_tensor, the rank's own piece"):
        local_of(sharded)
