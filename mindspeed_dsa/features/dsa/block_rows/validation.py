"""What reads rows in Megatron's order alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.features.dsa.block_rows.options import Options
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches import versions


def check_block_rows(args: Any, options: Options) -> Iterator[str]:
    """Report attentions and batches that know Megatron's rows only; absent arguments are not checked."""
    if options.ranks == 1 or not options.block_rows:
        return
    if argument(args, "experimental_attention_variant") != "dsa":
        yield (
            "--cp-block-rows balances sparse attention, and the model has none; omit it or add "
            "--experimental-attention-variant dsa"
        )
    release = versions.of_megatron(getattr(args, "megatron_root", "megatron"))
    if release is not None and release in SpecifierSet(">=0.19", prereleases=True):
        yield f"--cp-block-rows: the attention of Megatron-core {release} knows its own rows only; omit it"
