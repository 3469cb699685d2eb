"""Imbalance of each layer from recorded loads of experts, the records of ``--moe-router-load-report``."""

from __future__ import annotations

from pathlib import Path

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs import expert_load
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.metrics import Record
from mindspeed_dsa.tools.planner.job import Layout, Model
from mindspeed_dsa.tools.planner.report import runs

STEPS = 100
"""Number of last steps that count: early in training, routers are not as balanced as later."""


def imbalances(path: Path, model: Model, layout: Layout) -> tuple[float, ...]:
    """Return a number for each decoder layer, then for each layer of multi-token prediction.

    The number is the tokens of the fullest expert parallel rank over the mean of all; 1 for dense layers.
    With the expert parallel size of the records the recorded ranks count, which may have had placed experts.
    Otherwise experts are in the order of their numbers.

    Args:
        path: file, or folder that was passed to ``--moe-router-load-report``.
        model: sizes of the planned model.
        layout: its layout.

    Raises:
        SettingsError: records are missing or damaged, or of another model.
    """
    records = _read(path)
    counts = {len(layer["experts"]) for each in records for layer in each["layers"]}
    if counts != {model.experts}:
        found = " or ".join(map(str, sorted(counts)))
        raise _refused(path, f"it has layers of {found} experts, the job's have {model.experts or 'none'}")
    kinds = [*model.kinds, *model.mtp_kinds]
    wanted = [number for number, kind in enumerate(kinds, start=1) if kind.experts]
    for record in records:
        layers = sorted(layer["layer"] for layer in record["layers"])
        if layers != wanted:
            raise _refused(
                path,
                f"step {record['step']} has experts in layers {runs(layers)}, and the job has them in layers "
                f"{runs(wanted)} of {model.layers}{f' and {model.mtp} to predict' if model.mtp else ''}",
            )
    if model.experts % layout.ep:
        return ()  # the layout's own check refuses this size
    found_numbers = expert_load.rank_imbalances(records, layout.ep)
    return tuple(found_numbers.get(number, 1.0) for number in range(1, len(kinds) + 1))


def _read(path: Path) -> list[Record]:
    try:
        records, torn = expert_load.recent(path, STEPS)
    except RunError as error:
        raise SettingsError(f"mindspeed_dsa plan: --expert-load: {error}") from error
    if torn:
        raise SettingsError(
            f"mindspeed_dsa plan: --expert-load {path}: {torn} of its last lines are no records of steps; "
            "remove these lines, or give the records of another run"
        )
    return records


def _refused(path: Path, why: str) -> SettingsError:
    return SettingsError(
        f"mindspeed_dsa plan: --expert-load {path}: {why}; give the records of this model, or omit the "
        "option and use --imbalance"
    )
