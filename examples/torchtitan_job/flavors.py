"""Flavor ``671B_sdpa`` of TorchTitan 0.2's DeepSeek-V3, for ``[experimental] custom_import``.

TorchTitan's own flavor ``671B`` has FlexAttention, with which its context parallelism does not work.
"""

from dataclasses import replace

from torchtitan.models.deepseek_v3 import deepseekv3_args

import mindspeed_dsa.integrations.torchtitan  # noqa: F401 - registers the converters

deepseekv3_args["671B_sdpa"] = replace(deepseekv3_args["671B"], attn_type="sdpa", attn_mask_type="causal")
