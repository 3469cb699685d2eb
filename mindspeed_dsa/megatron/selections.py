"""Layers that select keys, and layers that attend to the keys which one below has selected.

From GLM-5.2 on one indexer serves several layers: a *computing* layer scores and selects, and the *sharing*
layers above it, up to the next computing one, attend to the same keys and own no indexer. The rule is that
of Megatron-core 0.19, for layers ``n`` counted from 1 and ``o = max(offset, 1)``: layer ``n`` computes if
``max(n - o, 0) % frequency == 0``. Hugging Face writes it for layers counted from 0,
``full if max(i - offset + 1, 0) % frequency == 0``, or as a list, which a pattern of letters stands for here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

COMPUTES, SHARES = "CF", "S"
"""Letters of a pattern: MindSpeed-LLM writes C and S, Hugging Face full and shared."""


@dataclass(frozen=True)
class Sharing:
    """Layers that compute a selection of keys, of a decoder and of its layers of multi-token prediction.

    Attributes:
        frequency: one layer in so many computes, from the offset on.
        offset: layers up to this one, counted from 1, compute as well; 0 is 1.
        pattern: a letter for each layer of the decoder, C or F to compute and S to share; it takes the place
            of frequency and offset. Empty: there is none.
        mtp_shares: of the layers of multi-token prediction only the first computes.
    """

    frequency: int = 1
    offset: int = 0
    pattern: str = ""
    mtp_shares: bool = False

    @classmethod
    def of(cls, config: Any) -> Self:
        """Build from a job's arguments or a model's configuration; what is absent is not shared."""
        if getattr(config, "experimental_attention_variant", "dsa") != "dsa":
            return cls()
        frequency = getattr(config, "dsa_indexer_topk_freq", None)
        return cls(
            frequency=1 if frequency is None else frequency,
            offset=getattr(config, "dsa_indexer_skip_topk_offset", None) or 0,
            pattern=(getattr(config, "dsa_indexer_topk_pattern", None) or "").upper(),
            mtp_shares=bool(getattr(config, "dsa_indexer_share_for_mtp", False)),
        )

    @property
    def is_on(self) -> bool:
        """Return whether some layer may share."""
        return self.frequency != 1 or SHARES in self.pattern or self.mtp_shares

    def computes(self, layer: int) -> bool:
        """Return whether a layer of the decoder selects keys itself.

        Args:
            layer: its number in the whole model, from 1.
        """
        if self.pattern:
            return layer > len(self.pattern) or self.pattern[layer - 1] != SHARES
        return max(layer - max(self.offset, 1), 0) % max(self.frequency, 1) == 0

    def mtp_computes(self, layer: int) -> bool:
        """Return whether a layer of multi-token prediction selects keys itself.

        Megatron-core 0.19 counts these layers from 1 again, and asks the same rule; a pattern is of the
        decoder alone.

        Args:
            layer: its number among the layers of multi-token prediction, from 1.
        """
        if layer == 1:
            return True
        if self.mtp_shares:
            return False
        return bool(self.pattern) or self.computes(layer)

    def source(self, layer: int) -> int:
        """Return the layer of the decoder whose selection this one attends to: itself, or one below."""
        while layer > 1 and not self.computes(layer):
            layer -= 1
        return layer

    def computing(self, layers: int, mtp_layers: int = 0) -> int:
        """Return how many layers select keys, of so many."""
        decoder = sum(self.computes(layer) for layer in range(1, layers + 1))
        return decoder + sum(self.mtp_computes(layer) for layer in range(1, mtp_layers + 1))

    def words(self, layers: int) -> str:
        """Say how many layers of the decoder select keys, and which: ``4 of 12 layers (1-3, 7)``."""
        selecting = [layer for layer in range(1, layers + 1) if self.computes(layer)]
        return f"{len(selecting)} of {layers} layers ({', '.join(_runs(selecting))})"

    def problems(self, layers: int | None = None) -> Iterator[str]:
        """Yield what is wrong with frequency, offset and pattern, each with its flag and a remedy.

        Args:
            layers: of the decoder; None: not known here.
        """
        if self.frequency < 1:
            flag = f"--dsa-indexer-topk-freq {self.frequency}"
            yield f"{flag}: one layer in so many selects keys; give 1 or more"
        if self.offset < 0:
            yield f"--dsa-indexer-skip-topk-offset {self.offset}: give the number of a layer, or 0"
        if self.frequency > 1 and layers is not None and self.offset > layers:
            yield (
                f"--dsa-indexer-skip-topk-offset {self.offset} lies beyond the {layers} layers of the model, "
                f"so that no layer shares; give --num-layers {self.offset} or more, or one of these layers, "
                "or omit --dsa-indexer-topk-freq, or the --dsa-model that sets both"
            )
        if not self.pattern:
            return
        flag = f"--dsa-indexer-topk-pattern {self.pattern}"
        unknown = sorted(set(self.pattern) - set(COMPUTES + SHARES))
        if unknown:
            yield f"{flag}: {' and '.join(unknown)} is no kind of layer; write C or F to compute, S to share"
        if layers is not None and len(self.pattern) != layers:
            yield f"{flag} has {len(self.pattern)} letters, and the model {layers} layers; give one for each"
        if self.pattern.startswith(SHARES):
            yield f"{flag}: layer 1 shares, and no layer below it selects; begin with C"
        if self.frequency > 1:
            yield (
                f"{flag} and --dsa-indexer-topk-freq {self.frequency} both say which layers share; omit one "
                "of them"
            )

    def chunk_problem(self, chunks: Iterable[Sequence[int]]) -> str | None:
        """Return why a pipeline's chunks cannot share, naming the layer; None if they can.

        A selection stays in its chunk, so each one has to begin with a layer that computes.

        Args:
            chunks: for each chunk the numbers of its decoder layers, ascending.
        """
        for chunk in chunks:
            if chunk and not self.computes(chunk[0]):
                source = self.source(chunk[0])
                return (
                    f"a pipeline chunk begins with layer {chunk[0]}, which shares the selection of layer "
                    f"{source} in another chunk; selections do not travel between chunks, so each must begin "
                    f"with a layer that computes: {', '.join(map(str, self._near(chunk[0])))}"
                )
        return None

    def _near(self, layer: int) -> list[int]:
        """Return the computing layers below and above a sharing one."""
        above = next((n for n in range(layer + 1, layer + 1 + 4 * self.frequency) if self.computes(n)), None)
        return [self.source(layer)] + ([] if above is None else [above])


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Yield ascending numbers, in short where their steps are equal: ``1-3``, ``7, 11, ..., 75``."""
    at = 0
    while at < len(numbers):
        last = at + 1
        while last + 1 < len(numbers) and numbers[last + 1] - numbers[last] == numbers[at + 1] - numbers[at]:
            last += 1
        if last - at < 2:  # two numbers are no run
            yield str(numbers[at])
            at += 1
            continue
        step = numbers[at + 1] - numbers[at]
        if step == 1:
            yield f"{numbers[at]}-{numbers[last]}"
        else:
            yield f"{numbers[at]}, {numbers[at + 1]}, {'..., ' * (last - at > 2)}{numbers[last]}"
        at = last + 1
