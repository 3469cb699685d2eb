"""Names of context parallel algorithms: MindSpeed's, Megatron's, and registered strategies.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.feature import Flag
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self

    from mindspeed_dsa.context_parallel.strategy import ContextParallelStrategy

COMM_TYPES = {
    "megatron_cp_algo": "p2p",
    "ulysses_cp_algo": "a2a",
    "kvallgather_cp_algo": "allgather",
    "hybrid_cp_algo": "a2a+p2p",
}
"""Dict from MindSpeed's algorithm name to Megatron's ``cp_comm_type``."""
ALGORITHM = Flag(
    "--context-parallel-algo",
    "Context parallel algorithm: megatron_cp_algo (ring), ulysses_cp_algo (all-to-all by head), "
    "hybrid_cp_algo (all-to-all within groups of --ulysses-degree-in-cp ranks, ring between groups), "
    "kvallgather_cp_algo (keys gathered), or the name of a registered strategy. The first four equal "
    "Megatron's --cp-comm-type p2p, a2a, a2a+p2p and allgather.",
    kind="value",
)
ULYSSES_DEGREE = Flag(
    "--ulysses-degree-in-cp",
    "Number of neighbouring context parallel ranks that exchange heads with hybrid_cp_algo; the groups form "
    "a ring.",
    kind="value",
    type=int,
)
BLOCK_ROWS = Flag(
    "--cp-block-rows",
    "Distribute tokens over context parallel ranks in blocks of so many tokens, so that all ranks have "
    "about the same work in sparse attention; 0: two chunks per rank, as in Megatron.",
    kind="value",
    type=int,
    default=0,
)
CONTEXT_PARALLEL_SIZE = Flag(
    "--context-parallel-size", "Megatron's own flag.", kind="value", type=int, megatron=True
)
COMM_TYPE = Flag("--cp-comm-type", "Megatron's own flag.", kind="value", nargs="+", megatron=True)
HIERARCHICAL_SIZES = Flag(
    "--hierarchical-context-parallel-sizes",
    "Megatron's own flag.",
    kind="value",
    type=int,
    nargs="+",
    megatron=True,
)
MEGATRON_FLAGS = (CONTEXT_PARALLEL_SIZE, COMM_TYPE, HIERARCHICAL_SIZES)
"""Megatron flags that :meth:`Algorithms.of` also reads; every feature that calls it lists them."""

Make = Callable[..., "ContextParallelStrategy"]
_registered: dict[str, Make] = {}


def register(name: str, make: Make) -> None:
    """Add an algorithm to the choices of ``--context-parallel-algo``. Call before features are enabled.

    Args:
        name: name of the algorithm.
        make: factory, for example a subclass of ``ContextParallelStrategy``. It is called with the process
            group and the layout, for each attention layer.

    Raises:
        SettingsError: the name is already registered or built in.
    """
    if name in COMM_TYPES or name in COMM_TYPES.values() or name in _registered:
        raise SettingsError(f"a context parallel algorithm named {name!r} exists already; use another name")
    _registered[name] = make


def unregister(name: str) -> None:
    """Remove a registered algorithm."""
    _registered.pop(name, None)


def registered(name: str) -> Make | None:
    """Return the factory registered for a name, or ``None``."""
    return _registered.get(name)


@dataclass(frozen=True)
class Algorithms:
    """Context parallel algorithms that a job's flags select.

    Attributes:
        ranks: context parallel size, 1 without context parallelism.
        names: names of algorithms (Megatron's or registered), one for all layers or one per layer. Empty if
            no flag is given; each attention then uses its own default.
        ulysses_degree: number of ranks in the inner all-to-all of ``a2a+p2p``, or ``None`` if not given.
        block_rows: number of tokens per block of a repeated zigzag; 0: one zigzag over the sequence.
    """

    ranks: int = 1
    names: tuple[str, ...] = ()
    ulysses_degree: int | None = None
    block_rows: int = 0

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Build from settings, a job's arguments or a Megatron configuration.

        ``p2p`` is the default of ``--cp-comm-type`` in Megatron-LM, so it never conflicts with the other
        flag.

        Raises:
            SettingsError: two flags name different algorithms, or a name is unknown.
        """
        ranks = getattr(settings, CONTEXT_PARALLEL_SIZE.dest, None) or 1
        algorithm = getattr(settings, ALGORITHM.dest, None)
        names = _canonical(getattr(settings, COMM_TYPE.dest, None))
        if algorithm is not None:
            named = _named(algorithm)
            # Only resolved settings tell a default from a given value.
            default = () if isinstance(settings, Settings) else ("p2p",)
            if names not in ((), (named,), default):
                raise SettingsError(
                    f"mindspeed_dsa: --context-parallel-algo {algorithm} and --cp-comm-type "
                    f"{' '.join(names)} name different algorithms; omit one of them"
                )
            names = (named,)
        unknown = [name for name in names if name not in COMM_TYPES.values() and name not in _registered]
        if unknown:
            raise SettingsError(
                f"mindspeed_dsa: --cp-comm-type {unknown[0]} is unknown; use {', '.join(COMM_TYPES.values())}"
            )
        return cls(ranks, names, _degree(settings), getattr(settings, BLOCK_ROWS.dest, None) or 0)

    def of_layer(self, number: int, default: str) -> str:
        """Return the name of a layer's algorithm (Megatron's or registered).

        Args:
            number: layer number from 1. MTP layers beyond the list of names use the last name.
            default: name to use if no flag is given.
        """
        if not self.names:
            return default
        return self.names[0] if len(self.names) == 1 else self.names[min(number, len(self.names)) - 1]

    def all_of(self, default: str) -> set[str]:
        """Return the set of all layers' algorithm names."""
        return set(self.names) or {default}

    def degree(self, name: str) -> int:
        """Return the number of ranks in an algorithm's all-to-all; 1 if it has none."""
        if name == "a2a":
            return self.ranks
        return (self.ulysses_degree or 1) if name == "a2a+p2p" else 1


def _named(algorithm: str) -> str:
    """Translate a value of ``--context-parallel-algo`` to Megatron's or the registered name."""
    if algorithm in _registered:
        return algorithm
    if algorithm not in COMM_TYPES:
        raise SettingsError(
            f"mindspeed_dsa: --context-parallel-algo {algorithm} is unknown; use one of "
            f"{', '.join([*COMM_TYPES, *_registered])}"
        )
    return COMM_TYPES[algorithm]


def _canonical(comm_type: str | Sequence[str] | None) -> tuple[str, ...]:
    """Normalize Megatron's ``cp_comm_type``: lower case, no underscores, one entry if all are equal."""
    names = [comm_type] if isinstance(comm_type, str) else list(comm_type or ())
    names = [name if name in _registered else name.replace("_", "").lower() for name in names]
    return tuple(names[:1] if len(set(names)) == 1 else names)


def _degree(settings: Any) -> int | None:
    """Return the Ulysses degree from either of its flags; raise if they differ."""
    degree: int | None = getattr(settings, ULYSSES_DEGREE.dest, None)
    sizes = getattr(settings, HIERARCHICAL_SIZES.dest, None)
    if not sizes:
        return degree
    if degree not in (None, sizes[0]):
        raise SettingsError(
            f"mindspeed_dsa: --ulysses-degree-in-cp {degree} and --hierarchical-context-parallel-sizes "
            f"{' '.join(map(str, sizes))} differ, whose first number is the same; omit one of them"
        )
    return int(sizes[0])


def check_context_parallel(args: Any, options: Algorithms) -> Iterator[str]:
    """Yield settings that no attention supports, each with a suggested fix."""
    ranks, names = options.ranks, options.names
    if ranks == 1:
        return
    layers = getattr(args, "num_layers", None)
    if len(names) > 1 and layers is not None and len(names) != layers:
        yield f"--cp-comm-type has {len(names)} names for {layers} layers; give one, or one for each layer"
    length = getattr(args, "seq_length", None)
    if length is not None and length % (2 * ranks):
        yield (
            f"--seq-length {length} is not divisible by two chunks for each of --context-parallel-size "
            f"{ranks}; use a multiple of {2 * ranks}"
        )
    yield from _problems_of_degree(options)
    yield from _problems_of_blocks(options, length)


def _problems_of_degree(algorithms: Algorithms) -> Iterator[str]:
    ranks, degree = algorithms.ranks, algorithms.ulysses_degree
    if "a2a+p2p" not in algorithms.names:
        if degree is not None:
            yield f"--ulysses-degree-in-cp {degree} belongs to hybrid_cp_algo; name that or omit it"
        return
    # 8 ranks: degrees 2 and 4.
    fitting = [size for size in range(2, ranks) if ranks % size == 0]
    if not fitting:
        yield (
            f"hybrid_cp_algo needs a context parallel size that is a product, and {ranks} is not; use "
            "ulysses_cp_algo or megatron_cp_algo"
        )
    elif degree not in fitting:
        yield (
            f"hybrid_cp_algo needs --ulysses-degree-in-cp to be one of {', '.join(map(str, fitting))} with "
            f"--context-parallel-size {ranks}, and it is {degree}"
        )


def _problems_of_blocks(algorithms: Algorithms, length: int | None) -> Iterator[str]:
    ranks, rows, run = algorithms.ranks, algorithms.block_rows, 2 * algorithms.ranks * algorithms.block_rows
    if rows < 0:
        yield f"--cp-block-rows {rows}: use 0 or more rows"
        return
    if rows and length is not None and length % run:
        yield (
            f"--cp-block-rows {rows} needs a sequence length divisible by two blocks for each of {ranks} "
            f"ranks, and {length} is not divisible by {run}"
        )
    # Only gathered keys allow any layout of rows.
    others = algorithms.all_of("allgather") & {"p2p", "a2a", "a2a+p2p"}
    if rows and others:
        yield (
            f"--cp-block-rows works where keys are gathered, and {', '.join(sorted(others))} needs "
            "Megatron's own rows; omit it or use kvallgather_cp_algo"
        )
