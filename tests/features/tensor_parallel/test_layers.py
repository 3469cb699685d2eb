"""Column and row parallel layers equal stock Megatron's, with collectives in chunks."""

from __future__ import annotations

import itertools

import pytest

from tests.support.releases import FULL_HERE

CASES = "tests.features.tensor_parallel.parallel_layers"
LAYERS = ("column", "row")
COUNTS = (2, 4, 8)
EXACT = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 1e-2}
PLAIN = [
    {"layer": layer, "sequence_parallel": parallel, "dtype": dtype, "sequence": 48}
    for layer, parallel, dtype in itertools.product(LAYERS, (True, False), ("float64", "float32"))
]
VARIANTS = {
    "uneven chunks": {"sequence": 20, "batch": 3},
    "fewer rows than chunks": {"sequence": 4, "batch": 1},
    "two dimensions": {"batch": None},
    "not contiguous": {"transposed": True},
    "no bias": {"bias": False},
    "bias returned": {"skip_bias_add": True},
    "frozen weight": {"frozen": True},
    "no backward": {"backward": False},
    "fp32 main_grad": {"main_grad": "float32", "dtype": "float32"},
    "fp32 main_grad of bf16": {"main_grad": "float32", "dtype": "bfloat16"},
    "bf16 main_grad": {"main_grad": "bfloat16", "dtype": "bfloat16"},
    "bf16": {"dtype": "bfloat16"},
}


def compare(pool, runs, counts=COUNTS, tp=2, **switches):
    """Run both sides, check for equal numbers and print the bit-identical results."""
    wanted = [{"coc_parallel_num": count, **switches} for count in counts]
    return exact(pool.run(f"{CASES}:compare", tp, runs=runs, switches=wanted), tp)


def exact(ranks, tp=2):
    """Check for equal numbers on all ranks; return the first rank's results."""
    for result in itertools.chain(*ranks):
        worst = max(result["errors"].values())
        print(f"TP{tp} {result['case']}: {worst:.1e}, bitwise {result['bitwise']}")
        assert worst <= EXACT[result["case"].get("dtype", "float64")], result
    return ranks[0]


def expected_calls(case, rows):
    """Return the expected collectives of two microbatches, forward and backward."""
    chunks, layer = min(case["coc_parallel_num"], rows), case["layer"]
    learns, again = not case.get("frozen"), case.get("coc_recompute_all_gather", True)
    if not case.get("sequence_parallel", True):
        return {"all_reduce": 2 * chunks}
    backward = 2 * chunks if case.get("backward", True) else 0
    if layer == "row":
        counts = {"all_gather": backward, "all_to_all_single": 2 * chunks}
    else:
        gathered_again = 2 if learns and again and backward else 0
        counts = {
            "all_gather": 2 * chunks,
            "all_gather_into_tensor": gathered_again,
            "all_to_all_single": backward,
        }
    # A single chunk is Megatron's own collective.
    if chunks == 1:
        counts["all_gather_into_tensor"] = counts.pop("all_gather") + counts.get("all_gather_into_tensor", 0)
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=FULL_HERE)])
def test_layers_are_stock_but_for_rounding(pool, tp):
    results = compare(pool, PLAIN, tp=tp)
    for result in results:
        assert result["calls"] == expected_calls(result["case"], rows=48 // tp * 2), result["case"]
    column = [result for result in results if result["case"]["layer"] == "column"]
    for result in column:
        in_chunks = result["case"]["sequence_parallel"]
        # Some matmuls sum in another order for fewer rows.
        assert "output 0" in result["bitwise"] or (in_chunks and not result["matmul_by_rows"]), result["case"]
    assert any("output 0" in result["bitwise"] for result in column if result["case"]["sequence_parallel"])


@pytest.mark.full
def test_eight_ranks(pool):
    for each in compare(pool, PLAIN, counts=(4,), tp=8):
        assert each["calls"] == expected_calls(each["case"], rows=12)


def unusual(parallel):
    """Return runs of all variants, with or without sequence parallelism."""
    runs = [
        {"layer": layer, "sequence_parallel": parallel, **variant}
        for layer in LAYERS
        for variant in VARIANTS.values()
    ]
    if not parallel:
        runs.append({"layer": "row", "input_is_parallel": False, "sequence_parallel": False})
    return runs


@pytest.mark.full
@pytest.mark.parametrize("parallel", [True, False], ids=["SP", "no SP"])
def test_unusual_inputs_where_the_number_of_chunks_is_measured(pool, parallel):
    for result in exact(pool.run(f"{CASES}:compare_tuned", 2, runs=unusual(parallel))):
        case = result["case"]
        directions = {"row": ["forward"], "column": ["backward"]}[case["layer"]]
        if parallel:
            directions = ["forward", "backward"]
        if not case.get("backward", True):
            directions = [direction for direction in directions if direction != "backward"]
        assert result["chosen"] == {f"{case['layer']} {direction}": 4 for direction in directions}, case


@pytest.mark.parametrize("parallel", [True, pytest.param(False, marks=FULL_HERE)], ids=["SP", "no SP"])
def test_unusual_inputs(pool, parallel):
    for result in compare(pool, unusual(parallel), counts=(4,)):
        case = result["case"]
        if not case.get("input_is_parallel", True):
            result["calls"].pop("all_gather_into_tensor", None)  # Megatron's scatter, in some releases
        rows = case.get("sequence", 12) * (case.get("batch", 2) or 1) // (2 if parallel else 1)
        if case["layer"] == "column" and not parallel and not case.get("backward", True):
            assert result["calls"] == {}, case
        else:
            assert result["calls"] == expected_calls(case, rows), case


def test_gathered_input_can_be_kept(pool):
    runs = [{"layer": layer} for layer in LAYERS] + [{"layer": "column", "frozen": True}]
    for each in compare(pool, runs, counts=(2, 4), coc_recompute_all_gather=False):
        assert each["calls"] == expected_calls(each["case"], rows=12)
        assert "all_gather_into_tensor" not in each["calls"]


@pytest.mark.parametrize(
    "case",
    [
        "experts, column",
        pytest.param("experts, row", marks=FULL_HERE),
        pytest.param("another matmul", marks=FULL_HERE),
        "sharded weight",
        "autocast",
        pytest.param("deferred weight gradient", marks=FULL_HERE),
    ],
)
def test_what_is_left_to_megatron(pool, case):
    # Megatron's reduce-scatter is one exchange; ours would be two, or an all-gather in parts.
    for calls in pool.run(f"{CASES}:left_to_megatron", 2, case=case):
        assert "all_gather" not in calls
        assert calls.get("all_to_all_single", 0) <= 1


FUNCTIONS = ("linear_with_frozen_weight", "linear_with_grad_accumulation_and_async_allreduce")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_may_be_given_by_position(pool, name):
    for calls in pool.run(f"{CASES}:with_arguments_by_position", 2, name=name, wgrad_deferral_limit=0):
        assert calls == {"all_gather": 2}


def test_a_duty_given_by_position_is_left_to_megatron(pool):
    given = {"name": FUNCTIONS[1], "grad_output_buffer": []}
    for calls in pool.run(f"{CASES}:with_arguments_by_position", 2, **given):
        assert "all_gather" not in calls, "as the function above has it without the duty"


@pytest.mark.parametrize("case", ["plain, column", "plain, row"])
def test_what_is_not_left_to_megatron(pool, case):
    """The same layers without the unusual property use our collectives."""
    for calls in pool.run(f"{CASES}:left_to_megatron", 2, case=case):
        assert (calls["all_gather"], calls["all_to_all_single"]) == (2, 2)
