"""Megatron's all-to-all is taken apart where a feature asks for it.

Imports neither torch nor the implementation, as ``feature.py`` of every feature that wants it does.
"""

from __future__ import annotations

from mindspeed_dsa.patches.spec import Patch

ROW = Patch(
    "megatron.core.tensor_parallel.mappings:all_to_all",
    "wrap",
    "mindspeed_dsa.megatron.parted_transfers:part_all_to_all",
    "one all-to-all in two halves, inside of the functions above",
    params=("group", "input_", "output_split_sizes_", "input_split_sizes"),
)
