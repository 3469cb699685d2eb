"""Rule that decides which layers select keys and which reuse the selection of a layer below.

Since GLM-5.2 one indexer serves several layers. A *computing* layer scores and selects keys. The *sharing*
layers above it, up to the next computing one, attend to the same keys and have no indexer. The rule is
Megatron-core 0.19's. With layers ``n`` counted from 1 and ``o = max(offset, 1)``, layer ``n`` computes if
``max(n - o, 0) % frequency == 0``.

Hugging Face counts layers from 0 and writes ``full if max(i - offset + 1, 0) % frequency == 0``, or gives a
list. A list becomes a pattern of letters here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

COMPUTES, SHARES = "CF", "S"
"""Letters of a pattern. MindSpeed-LLM writes C and S, Hugging Face ``full`` and ``shared``."""


@dataclass(frozen=True)
class Sharing:
    """Model's configuration of which decoder and multi-token prediction layers select keys.

    Attributes:
        frequency: period of computing layers after the offset: 4 means every fourth layer.
        offset: number of the last layer of the initial block in which all layers compute; 0 means 1.
        pattern: one letter per decoder layer, C or F to compute and S to share; overrides frequency and
            offset. Empty without a pattern.
        mtp_shares: whether only the first multi-token prediction layer computes.
    """

    frequency: int = 1
    offset: int = 0
    pattern: str = ""
    mtp_shares: bool = False

    @classmethod
    def of(cls, config: Any) -> Self:
        """Build the rule from a job's arguments or a model's configuration; by default no layers share."""
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
        """Whether some layers may share the selection of a layer below."""
        return self.frequency != 1 or SHARES in self.pattern or self.mtp_shares

    def computes(self, layer: int) -> bool:
        """Return whether a decoder layer selects keys itself.

        Args:
            layer: layer number in the whole model, from 1.
        """
        if self.pattern:
            return layer > len(self.pattern) or self.pattern[layer - 1] != SHARES
        # offset 3, frequency 4: layers 1 to 3 compute, then 7, 11, ...
        return max(layer - max(self.offset, 1), 0) % max(self.frequency, 1) == 0

    def mtp_computes(self, layer: int) -> bool:
        """Return whether a multi-token prediction layer selects keys itself.

        Megatron-core 0.19 counts these layers from 1 again and applies the same rule. A pattern covers only
        the decoder.

        Args:
            layer: layer number among the multi-token prediction layers, from 1.
        """
        if layer == 1:
            return True
        if self.mtp_shares:
            return False
        return bool(self.pattern) or self.computes(layer)

    def mtp_source(self, layer: int) -> int:
        """Return the multi-token prediction layer whose selection this one uses: itself, or one below."""
        while not self.mtp_computes(layer):
            layer -= 1
        return layer

    def source(self, layer: int) -> int:
        """Return the decoder layer whose selection this layer uses: itself, or one below."""
        # With offset 3 and frequency 4, layers 4 to 6 share layer 3's selection.
        while layer > 1 and not self.computes(layer):
            layer -= 1
        return layer

    def computing(self, layers: int, mtp_layers: int = 0) -> int:
        """Return the number of layers that select keys, among decoder and multi-token prediction layers."""
        decoder = sum(self.computes(layer) for layer in range(1, layers + 1))
        return decoder + sum(self.mtp_computes(layer) for layer in range(1, mtp_layers + 1))

    def words(self, layers: int) -> str:
        """Describe the decoder layers that select keys: ``4 of 12 layers (1-3, 7)``."""
        selecting = [layer for layer in range(1, layers + 1) if self.computes(layer)]
        return f"{len(selecting)} of {layers} layers ({', '.join(_runs(selecting))})"

    def problems(self, layers: int | None = None) -> Iterator[str]:
        """Yield problems of frequency, offset and pattern, each with its flag and a remedy.

        Args:
            layers: number of decoder layers, ``None`` if unknown.
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
        """Return the reason why selections cannot be shared with this split into chunks, or ``None``.

        A selection is not sent between chunks, so each chunk has to begin with a computing layer.

        Args:
            chunks: ascending decoder layer numbers of each chunk.
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
        """Return the nearest computing layers below and above a sharing layer."""
        above = next((n for n in range(layer + 1, layer + 1 + 4 * self.frequency) if self.computes(n)), None)
        return [self.source(layer)] + ([] if above is None else [above])


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Yield texts for ascending numbers, abbreviating equal steps: ``1-3``, ``7, 11, ..., 75``."""
    start = 0
    while start < len(numbers):
        last = start + 1
        while (
            last + 1 < len(numbers)
            and numbers[last + 1] - numbers[last] == numbers[start + 1] - numbers[start]
        ):
            last += 1
        if last - start < 2:  # two numbers are no run
            yield str(numbers[start])
            start += 1
            continue
        step = numbers[start + 1] - numbers[start]
        if step == 1:
            yield f"{numbers[start]}-{numbers[last]}"
        else:
            yield f"{numbers[start]}, {numbers[start + 1]}, {'..., ' * (last - start > 2)}{numbers[last]}"
        start = last + 1
