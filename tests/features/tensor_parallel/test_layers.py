"""Column and row parallel layers compute what stock Megatron's do, and their collectives come in chunks."""

from __future__ import annotations

import pytest

CASE = "tests.features.tensor_parallel.cases:compare"
LAYERS = ("column", "row")
COUNTS = (2, 4, 8)
EXACT = {"float64": 1e-13, "float32": 1e-6}


def compare(pool, layer, tp=2, dtype="float64", chunks=2, **options):
    switches = {"coc_parallel_num": chunks, **options.pop("switches", {})}
    ranks = pool.run(CASE, tp, layer=layer, dtype=dtype, switches=switches, **options)
    for rank in ranks:
        worst = max(rank["errors"].values())
        print(f"{layer} TP{tp} {dtype} {chunks} chunks {options}: {worst:.1e}, bitwise {rank['bitwise']}")
        assert worst <= EXACT[dtype], rank["errors"]
    return ranks[0]["calls"]


def expected_calls(layer, chunks, sequence_parallel):
    """Forward and backward of one layer that gathers its input again."""
    if not sequence_parallel:
        return {"all_reduce": chunks}
    if layer == "column":
        return {"all_gather": chunks, "all_gather_into_tensor": 1, "reduce_scatter_tensor": chunks}
    return {"all_gather": chunks, "reduce_scatter_tensor": chunks}


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["SP", "no SP"])
@pytest.mark.parametrize("chunks", COUNTS)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_stock_but_for_rounding(pool, layer, tp, chunks, sequence_parallel):
    for dtype in EXACT:
        calls = compare(pool, layer, tp, dtype, chunks, sequence=64, sequence_parallel=sequence_parallel)
        assert calls == expected_calls(layer, chunks, sequence_parallel)
