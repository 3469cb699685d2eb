"""How Megatron-core 0.19 comes to know and choose our kernel backend.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from mindspeed_dsa.features.attention.fused import options
from mindspeed_dsa.features.attention.fused.options import Options

NAME = "mindspeed"
MODULE = "mindspeed_dsa.features.attention.fused.kernel_backend"


# Annotations are real types in this module: Megatron-LM reads a flag's choices from them.
@dataclasses.dataclass
class _Choice:
    dsa_kernel_backend: Literal["none", "tilelang", "cudnn", "mindspeed"] = "none"


FIELD = dataclasses.fields(_Choice)[0]
"""The configuration's field with one more choice."""


def parts() -> Options:
    """What of DSA our operators take over; all of it, if no part was named."""
    chosen = options.current()
    if chosen.any:
        return chosen
    return dataclasses.replace(chosen, absorb=True, indexer=True, attention=True, kl_loss=True)


def refusals(chosen: Options) -> list[str]:
    """Switches that this release does not get; each with the way out."""
    if not chosen.fuse_kl_in_backward:
        return []
    return ["--dsa-fuse-kl-in-backward is made for Megatron-core 0.16 to 0.18; leave it away"]


def accept_our_backend(original: Callable[[str], None]) -> Callable[[str], None]:
    """Decorate ``_validate_dsa_kernel_backend_dependencies``, which insists on CUDA."""

    def _validate_dsa_kernel_backend_dependencies(dsa_kernel_backend: str) -> None:
        if dsa_kernel_backend != NAME:
            original(dsa_kernel_backend)

    return _validate_dsa_kernel_backend_dependencies


def choose_our_backend(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__``: a DSA model gets our backend unless it named another."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.experimental_attention_variant == "dsa":
            problems = refusals(options.current())
            if self.dsa_kernel_backend not in ("none", NAME):
                problems.append(
                    f"dsa_kernel_backend={self.dsa_kernel_backend!r} asks for other kernels than "
                    "--use-fused-dsa; leave one of them away"
                )
            if getattr(self.attention_backend, "name", self.attention_backend) == "unfused":
                problems.append(
                    "with attention_backend=unfused Megatron asks no kernel backend; use --attention-backend "
                    "auto or leave --use-fused-dsa away"
                )
            if problems:
                raise ValueError("mindspeed_dsa: dsa-kernel-backend: " + "; ".join(problems))
            self.dsa_kernel_backend = NAME
        original(self, *args, **kwargs)

    return __post_init__
