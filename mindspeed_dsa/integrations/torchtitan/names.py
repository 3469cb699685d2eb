"""Converter names, options of sparse attention, and error messages, shared by all TorchTitan releases.

Does not import TorchTitan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args

from mindspeed_dsa.context_parallel.algorithms import registered
from mindspeed_dsa.ops.backend import BackendName
from mindspeed_dsa.ops.dsa.attention import Stage
from mindspeed_dsa.ops.rotary import Layout

CONVERTERS = {
    "npu_dsa": "dsa",
    "npu_rms_norm": "rms_norm",
    "npu_permute": "permute",
    "npu_gmm": "grouped_matmul",
    "npu_rope": "rope",
}
"""Converter names as in TorchTitan-npu, with their device-neutral names."""
GATHER = "kvallgather_cp_algo"
"""Context parallel algorithm that gathers keys, the name that it also has with Megatron."""
DEVICES = ("cpu", "cuda", "npu")
"""Device types that the operators have backends for."""


def resolve(names: Iterable[str], *, what: str) -> tuple[str, ...]:
    """Return the converter names without ``npu_``, in the given order.

    Args:
        names: names with or without ``npu_``.
        what: name of the setting that lists the converters, for the error.

    Raises:
        ValueError: a name is unknown, or a converter is named twice.
    """
    resolved: list[str] = []
    for name in names:
        neutral = CONVERTERS.get(name, name)
        if neutral not in CONVERTERS.values():
            raise ValueError(unknown(name, what))
        if neutral in resolved:
            raise ValueError(f"{what}: {name!r} is listed twice ({neutral} has two names); list it once")
        resolved.append(neutral)
    return tuple(resolved)


def unknown(name: str, what: str) -> str:
    """Return the message for an unknown converter name.

    Args:
        name: name as the user wrote it.
        what: name of the setting that lists the converter.
    """
    ours = [f"{npu} or {neutral}" for npu, neutral in CONVERTERS.items()]
    known = [*CONVERTERS, *CONVERTERS.values()]
    close = get_close_matches(name, known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else "."
    return f"{what}: there is no converter {name!r}{hint} mindspeed_dsa has {', '.join(ours)}"


def check_device(converter: str, device: str) -> None:
    """Raise ``ValueError`` unless the operators run on this type of device."""
    if device not in DEVICES:
        raise ValueError(
            f"{converter}: mindspeed_dsa's operators have no backend for {device!r} devices; they run on "
            f"{', '.join(DEVICES)}. Leave the converter out there"
        )


def nothing_found(converter: str, model: Any, wanted: str) -> ValueError:
    """Return the error for a model without the layers that a converter replaces."""
    return ValueError(
        f"{converter}: {_named(model)} has no {wanted}. Leave the converter out, or choose a model with it"
    )


def not_plain(converter: str, where: str, found: Any, plain: type) -> ValueError:
    """Return the error for a layer that another converter (quantisation, LoRA) has replaced."""
    return ValueError(
        f"{converter}: {where} is {_named(found)}, where it takes {_named(plain)} and nothing else: its "
        f"weight is read as it is, which others are not. List {where.rpartition('.')[2]!r} in "
        "neither the quantising converter's filter nor that of LoRA, list LoRA after this converter, or "
        "leave this converter out"
    )


def _named(of: Any) -> str:
    return (of if isinstance(of, type) else type(of)).__qualname__


@dataclass(frozen=True)
class SparseOptions:
    """Options of sparse attention.

    Attributes:
        topk: number of keys that a token attends to.
        index_heads: number of indexer heads.
        index_dim: size of an indexer head.
        loss_coeff: factor of the indexer's loss, a mean over the tokens of a step; 0 disables its training.
        stage: ``"sparse"`` or ``"warmup"``, see :data:`mindspeed_dsa.ops.dsa.attention.Stage`.
        rope_layout: rotary layout of the indexer: ``"halves"`` as in DeepSeek-V3.2, or ``"pairs"`` as in
            GLM-5.
        backend: backend of the operators.
        context_parallel_algo: context parallel algorithm, :data:`GATHER` or a name given to
            :func:`mindspeed_dsa.context_parallel.algorithms.register`.
    """

    topk: int = 2048
    index_heads: int = 64
    index_dim: int = 128
    loss_coeff: float = 0.01
    stage: Literal["sparse", "warmup", "warm-up"] = "sparse"
    rope_layout: Literal["halves", "pairs"] = "halves"
    backend: str = "auto"
    context_parallel_algo: str = GATHER

    def check(self, rope_dim: int) -> None:
        """Raise one ``ValueError`` that names every invalid option.

        Args:
            rope_dim: number of rotary dimensions of the model's heads, which the indexer's heads use too.
        """
        wrong = [
            f"{name} is {value}, and has to be at least 1"
            for name, value in (("topk", self.topk), ("index_heads", self.index_heads))
            if value < 1
        ]
        if self.index_dim < rope_dim:
            wrong.append(f"index_dim is {self.index_dim}, less than the model's {rope_dim} rotary dimensions")
        if self.loss_coeff < 0:
            wrong.append(f"loss_coeff is {self.loss_coeff}; use 0 for no loss")
        choices: tuple[tuple[str, str, Any], ...] = (
            ("stage", self.stage, Stage),
            ("rope_layout", self.rope_layout, Layout),
            ("backend", self.backend, BackendName),
        )
        wrong += [
            f"{name} is {value!r}, and has to be one of {', '.join(get_args(allowed))}"
            for name, value, allowed in choices
            if value not in get_args(allowed)
        ]
        if self.context_parallel_algo != GATHER and registered(self.context_parallel_algo) is None:
            wrong.append(
                f"context_parallel_algo is {self.context_parallel_algo!r}, and has to be {GATHER} or the "
                "name of a registered strategy"
            )
        if wrong:
            raise ValueError(f"npu_dsa: {'; '.join(wrong)}")


def options_of(given: dict[str, Any]) -> SparseOptions:
    """Build the options from a mapping; raise ``ValueError`` for unknown keys."""
    fields = SparseOptions.__dataclass_fields__
    wrong = [key for key in given if key not in fields]
    if wrong:
        raise ValueError(f"npu_dsa has no option {', '.join(map(repr, wrong))}; it has {', '.join(fields)}")
    return SparseOptions(**given)


def rows_of_a_step(sequences: int, local: int, length: int, ranks: int) -> int:
    """Return the number of tokens per step on all ranks, over which losses are averaged.

    Args:
        sequences: number of sequences per step on all ranks (``global_batch_size``); negative means ``local``
            on each data parallel rank.
        local: number of sequences per rank and forward pass (``local_batch_size``).
        length: number of tokens per sequence.
        ranks: number of data parallel ranks.
    """
    # 256 sequences of 4096 tokens: 1,048,576 tokens in a step.
    return (sequences if sequences > 0 else local * ranks) * length
