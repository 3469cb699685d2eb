"""Feature for the search for the layers that need an indexer; the command `selections search` enables it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.dsa.selection_search.greedy import Request, keep_problems, letters_of
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.dsa import Options as Parts
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.pipeline_chunks import Split
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.runs.files import RunError

SEARCH = "--dsa-search-selections"


@dataclass(frozen=True)
class Options:
    """Options of the search.

    Attributes:
        folder: folder with the request, which also gets the results; None: no search.
    """

    folder: Path | None = None

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings."""
        folder = getattr(settings, "dsa_search_selections", None)
        return cls(None if folder is None else Path(folder))


def check_search(args: Any, options: Options | None) -> Iterator[str]:
    """Yield reasons why the layers of a job cannot be searched."""
    options = Options.of(args) if options is None else options
    if options.folder is None:
        return
    # Configurations of older releases lack the field.
    if getattr(args, "experimental_attention_variant", "dsa") != "dsa":
        yield f"{SEARCH}: the model selects no keys; add --experimental-attention-variant dsa"
        return
    parts = Parts.of(args)
    if parts.attends_densely:
        yield (
            f"{SEARCH}: --dsa-stage {parts.stage} attends to all keys, whichever layer selects; omit the flag"
        )
    yield from refuse_graphs(args, SEARCH, "a graph keeps the pattern that it was captured with")
    try:
        request = Request.read(options.folder)
    except RunError as error:
        yield f"{SEARCH}: {error}"
        return
    yield from _model_problems(args, request)


def _model_problems(args: Any, request: Request) -> Iterator[str]:
    """Yield problems of the model's layers and chunks with a request."""
    layers = argument(args, "num_layers")
    if layers is None:
        return
    sharing, mtp_layers = Sharing.of(args), argument(args, "mtp_num_layers") or 0
    start = letters_of(sharing, layers)
    # A pattern has no letters for these layers: with one, each of them computes.
    by_rule = [n for n in range(2, mtp_layers + 1) if not sharing.mtp_computes(n)]
    if by_rule and not sharing.mtp_shares:
        yield (
            f"{SEARCH}: layer {by_rule[0]} of multi-token prediction shares by --dsa-indexer-topk-freq "
            f"{sharing.frequency}, and no pattern has it; give --dsa-indexer-topk-pattern {start} instead"
        )
    try:
        split = Split.of(args)
    except ValueError:
        return  # another check reports the layout
    if split is None or split.problem:
        return
    firsts = [chunk[0] for chunk in split.in_order if chunk]
    yield from keep_problems(request.layers_kept, start, firsts)
    if split.chunks > 1 and not split.v_shaped and request.microbatches % split.ranks:
        yield (
            f"--microbatches {request.microbatches}: the interleaved schedule takes a multiple of the "
            f"{split.ranks} pipeline ranks"
        )


SELECTION_SEARCH = Feature(
    name="dsa-selection-search",
    summary="Searches for the layers that can attend to the keys of a layer below, and ends the job.",
    flags=(
        Flag(
            SEARCH,
            "Search for the layers that need an indexer as DIR/request.json says, then end the job; "
            "`python -m mindspeed_dsa selections search` writes that file and sets this.",
            kind="value",
            metavar="DIR",
        ),
        EXPERIMENTAL_ATTENTION_VARIANT,
    ),
    requires=Requires(features=("dsa-shared-selections",)),
    conflicts=(
        Conflict(
            "dsa-recorded-selections",
            "a search tries other selections than those that are recorded or replayed; omit one of them",
        ),
    ),
    options=Options.of,
    check=check_search,
    doc="dsa-shared-selections.md",
    patches=(
        Patch(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            "wrap",
            "mindspeed_dsa.features.dsa.selection_search.job:search_instead",
            "the first training step has the model, the data and the schedule that a search needs",
            priority=300,  # outside all others, which then see evaluations
        ),
    ),
)
