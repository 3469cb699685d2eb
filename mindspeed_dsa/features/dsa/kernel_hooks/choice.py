"""Registers our kernel backend with Megatron-core 0.19, and decides when it is selected.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.kernel_hooks.feature import Options, refusals

NAME = "mindspeed"


# Annotations are real types in this module: Megatron-LM reads a flag's choices from them.
@dataclasses.dataclass
class _Choice:
    dsa_kernel_backend: Literal["none", "tilelang", "cudnn", "mindspeed"] = "none"


FIELD = dataclasses.fields(_Choice)[0]
"""The configuration's field with one more choice."""


def accept_our_backend(original: Callable[[str], None]) -> Callable[[str], None]:
    """Decorate ``_validate_dsa_kernel_backend_dependencies``, which requires CUDA."""

    def _validate_dsa_kernel_backend_dependencies(dsa_kernel_backend: str) -> None:
        if dsa_kernel_backend != NAME:
            original(dsa_kernel_backend)

    return _validate_dsa_kernel_backend_dependencies


def choose_our_backend(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__``: a DSA model gets our backend unless it names another."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.experimental_attention_variant == "dsa":
            problems = refusals(context.options)
            if self.dsa_kernel_backend not in ("none", NAME):
                problems.append(
                    f"dsa_kernel_backend={self.dsa_kernel_backend!r} selects other kernels than "
                    "--use-fused-dsa; omit one of them"
                )
            if getattr(self.attention_backend, "name", self.attention_backend) == "unfused":
                problems.append(
                    "with attention_backend=unfused Megatron queries no kernel backend; use "
                    "--attention-backend auto or omit --use-fused-dsa"
                )
            if problems:
                raise ValueError("mindspeed_dsa: dsa-kernel-backend: " + "; ".join(problems))
            self.dsa_kernel_backend = NAME
        original(self, *args, **kwargs)

    return __post_init__
