"""Location and size of modules: shared rooms hold only shared code, and one idea is one file."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mindspeed_dsa
from mindspeed_dsa.features import all_flags, built_in
from mindspeed_dsa.runs.whole_checkpoints import TRACKER
from mindspeed_dsa.settings import GENERAL_FLAGS
from tests.support.import_graph import Sources

PACKAGE = "mindspeed_dsa"
FOLDER = Path(mindspeed_dsa.__file__).parent
SHARED = ("megatron", "optimizers", "parallel", "context_parallel", "runs")
"""Rooms for code that at least two kinds of features use, or a kind and a higher room."""
SMALLEST, LARGEST = 60, 500
SMALL = {
    "__main__": "the commands, by the name that Python asks for",
    "rl": "names that stay, for programs",
    "transformers": "names that stay, for programs",
    "weights": "names that stay, for programs",
    "megatron_adaptor": "the one line in a training script",
    "tools.compat.__main__": "the command behind `make compat` and `make docs`",
    "ops.indexer_kl_loss.reference": "the formula alone, as every large operator has it",
}
"""Files below :data:`SMALLEST` lines that only their own folder imports, with the reasons."""


TOTALS = {
    # 2,300 more: architectures, contract of files, FP8, weights check, chats; 1,200 more: the search for the
    # layers that need an indexer, with its command; 650 more: indexers that learn for all layers they serve.
    # 480 more: calibration of plans by measured runs, with --measured, an option of the command plan.
    # 700 more: formulas of the planner for moved bytes, launches, imbalance and copies of tokens, and the
    # sources of its constants.
    # 300 more: weights of experts along chains of ranks, passed on by a thread or enqueued on a stream.
    # 600 more: recorded loads in plans, the deal of layers to stages, remedies of unequal loads in `experts`.
    # 600 more: one layer of experts simulated on a cluster's links, and plans of chains.
    # 450 more: a vocabulary divided among context parallel ranks.
    # 350 more: context parallel ranks of TorchTitan, with documents and strategies of a job.
    # 350 more: adapters (LoRA) beside absorbed attention, with both packages' structures.
    # 500 more: sinks, windows beside a selection, keys of pools, shared key heads, and layouts of indexers.
    # 850 more: TorchTitan's moments on the host, rotary embeddings, and operators in compiled layers.
    # 300 more: FP8 by the recipe's properties, and recomputation with the scales of the forward.
    # 150 more: parts of a step that CUDA graphs capture, and the refusals of 17 features that had none.
    # 150 more: the divided vocabulary in plans, and links inside and between nodes in plans of moved experts.
    # 150 more: four families of transformers' models, by a table.
    # 550 more: plans of TorchTitan's files, whose settings and shards are others than Megatron's.
    # 400 more: Hopper's backward by rows, for few heads and in a fixed order, until a GPU decides on tiles.
    # 20 more: names of settings of TorchTitan that plans need not know, so that they know all others.
    # 40 more: Hopper's backward in a fixed order takes long rows in parts, within the memory of a workspace.
    # 25 more: errors that name the comparison that failed, and a flag that exists and helps.
    # 40 more: flags that nothing reads are named, hybrid models refused, YaRN in derived configurations.
    # 115 more: checkpoints outlive saves in their places; exports know their job and added tokens.
    # 30 more: exports to folders of other jobs are refused before training.
    # 90 more: FSDP2 checks gradients for NaN, DualPipeV logs losses of predicted tokens, seven refusals.
    # 120 more: a second setup, save or measurement in one job, recordings that lack steps of the job, and
    # releases of --sft.
    # 250 more: `hang` judges jobs that were killed, paused or on devices; state moved by verl, loops of other
    # programs, and options of late steps.
    # 255 less: patches of schedules, tables of refusals and helpers of commands are each in one place; 180
    # lines more refuse jobs in which a flag does nothing, or which end late.
    # 185 more: gradients of an indexer follow each batch's rows; loops of other programs load no other model;
    # hybrid models, packs that Megatron delivers and saves of moved memory, with wrong numbers, are refused;
    # `doctor` takes ranks and variables from srun, mpirun and the command line.
    "lines": 104_125,
    # --dsa-search-selections, by which the command reaches into the job; --dsa-indexer-loss-layers;
    # --cp-shard-vocabulary, which saves memory of weights for more transfers.
    "flags": 116,
    # dsa-selection-search, which ends the job that it is on in; cp-shard-vocabulary.
    "features": 71,
    # Nodes of TorchTitan's compiled graphs, and the objects that tensors in these graphs stand for.
    "state": 36,
}
"""Largest totals: lines without comments, our own flags, features, and module names that hold state.

A change that raises one says here why.
"""
STATE = set(
    "ContextVar WeakKeyDictionary WeakValueDictionary WeakSet defaultdict dict list set local".split()
)
"""Calls whose results hold state."""


@cache
def short(module: str) -> str:
    return module.removeprefix(PACKAGE).lstrip(".")


@cache
def owner(module: str) -> str:
    """Return ``features.moe`` for a kind, ``ops.rotary`` for an operator, otherwise the room."""
    parts = short(module).split(".")
    return ".".join(parts[:2]) if parts[0] in ("features", "ops") and len(parts) > 2 else parts[0]


@cache
def users(sources: Sources) -> dict[str, set[str]]:
    """Return the owners that import each module, directly or through modules of the module's owner."""
    importers = defaultdict(set)
    for reference in sources.references:
        importers[reference.imported].add(reference.importer)
    result = {}
    for module in sources.files:
        seen, todo, owners = set(), [module], set()
        while todo:
            for importer in importers[todo.pop()] - seen:
                seen.add(importer)
                if owner(importer) == owner(module):
                    todo.append(importer)
                else:
                    owners.add(owner(importer))
        result[module] = owners
    return result


def listed(wrong: list[str]) -> str:
    return "\n".join(["", *sorted(wrong)])


def test_shared_rooms_hold_what_is_shared(sources):
    """A module with one user belongs in that user's folder."""
    wrong = [
        f"{short(module)} is used by {', '.join(owners) or 'nobody'} alone"
        for module, owners in users(sources).items()
        if short(module).partition(".")[0] in SHARED
        and sources.files[module].name != "__init__.py"
        and len(owners) < 2
    ]
    assert not wrong, listed(wrong)


def test_what_operators_share_has_two_users(sources):
    """Covers modules next to the operators' folders, and in the folders of a kind of device."""
    devices = ("cpu", "npu", "triton")
    operators = {
        path.name for path in (FOLDER / "ops").iterdir() if path.is_dir() and path.name not in devices
    }
    wrong = []
    for module, owners in users(sources).items():
        parts = short(module).split(".")
        shared = parts[0] == "ops" and len(parts) > 1 and parts[1] not in operators
        if shared and sources.files[module].name != "__init__.py" and len(owners) < 2:
            wrong.append(f"{short(module)} is used by {', '.join(owners) or 'nobody'} alone")
    assert not wrong, listed(wrong)


def test_small_files_have_a_second_importer(sources):
    importers = defaultdict(set)
    for reference in sources.references:
        importers[reference.imported].add(sources.files[reference.importer].parent)
    wrong = []
    for module, file in sources.files.items():
        lines = len(file.read_text(encoding="utf-8").splitlines())
        # The registry finds declarations by file name.
        if file.name == "feature.py" or lines >= SMALLEST or short(module) in SMALL:
            continue
        if len(importers[module] - {file.parent}) < 1:
            wrong.append(f"{short(module)} has {lines} lines, and only its own folder imports it")
    assert not wrong, listed(wrong)


def test_no_file_is_too_long_to_read(sources):
    lengths = {
        module: len(file.read_text(encoding="utf-8").splitlines()) for module, file in sources.files.items()
    }
    wrong = [f"{short(module)} has {lines} lines" for module, lines in lengths.items() if lines > LARGEST]
    assert not wrong, listed(wrong)


def test_every_exception_is_needed(sources):
    for name in SMALL:
        file = sources.files[f"{PACKAGE}.{name}"]
        assert len(file.read_text(encoding="utf-8").splitlines()) < SMALLEST, name


def test_megatrons_tracker_is_named_once(sources):
    files = [
        name for name, file in sources.files.items() if f'"{TRACKER}"' in file.read_text(encoding="utf-8")
    ]
    assert files == [f"{PACKAGE}.runs.whole_checkpoints"]


def test_no_source_has_control_characters():
    """A replacement by a script once left invisible characters in 74 files."""
    root = FOLDER.parent
    files = [
        file for name in (PACKAGE, "tests", "benchmarks", "examples") for file in (root / name).rglob("*.py")
    ]
    assert len(files) > 1000
    wrong = [
        str(file.relative_to(root))
        for file in files
        if re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", file.read_bytes())
    ]
    assert not wrong, listed(wrong)


def state_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module that hold state: empty containers and context variables."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        empty = isinstance(value, (ast.Dict, ast.List)) and not ast.unparse(value).strip("{}[]")
        made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in STATE
        # Tables built from values are constants.
        made = made and (not value.args or ast.unparse(value.func) in ("ContextVar", "defaultdict"))
        if empty or made:
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_the_library_does_not_grow_unnoticed(sources):
    texts = [file.read_text(encoding="utf-8") for file in sources.files.values()]
    own_flags = {flag.dest for flag in (*GENERAL_FLAGS, *all_flags()) if not flag.megatron}
    totals = {
        "lines": sum(not line.lstrip().startswith("#") for text in texts for line in text.splitlines()),
        "flags": len(own_flags),
        "features": len(built_in()),
        "state": sum(1 for tree in sources.trees.values() for _ in state_of(tree)),
    }
    wrong = [
        f"{totals[name]} {name}, and {most} are allowed"
        for name, most in TOTALS.items()
        if totals[name] > most
    ]
    assert not wrong, listed(wrong)
