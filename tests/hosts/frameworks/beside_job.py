"""Job with a library that patches Megatron before or after features: ``beside_job.py LIBRARY before|after``.

Prints, as JSON, the libraries that the session detects, and the states of the sites.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys

import mindspeed_dsa
from mindspeed_dsa import session


def liger() -> None:
    """Let Liger-Kernel apply all of its patches."""
    from liger_kernel.megatron import apply_liger_kernel_to_megatron

    apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)


def mcore_bridge() -> None:
    """Import mcore-bridge, which patches; the Transformer Engine that it needs has empty layers here."""
    from tests.hosts.frameworks import stand_ins

    stand_ins.load(stand_ins.TRANSFORMER_ENGINE)
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        "2.10.0" if name.replace("_", "-") == "transformer-engine" else version(name)
    )
    from mcore_bridge import ModelConfig, get_mcore_model  # noqa: F401


def ours() -> None:
    """Enable features that patch the same places as these libraries."""
    mindspeed_dsa.enable(
        experimental_attention_variant="dsa",
        use_fused_dsa=True,
        use_fused_rmsnorm=True,
        use_fused_swiglu=True,
        use_fused_rotary_pos_emb=True,
        recompute_norm=True,
        recompute_activation_function=True,
    )


def main(library: str, order: str) -> None:
    """Patch in the given order, and verify."""
    theirs = {"liger": liger, "mcore_bridge": mcore_bridge}[library]
    for step in (theirs, ours) if order == "before" else (ours, theirs):
        step()
    for module in ("models.backends", "models.gpt.gpt_model", "transformer.multi_token_prediction"):
        importlib.import_module(f"megatron.core.{module}")
    mindspeed_dsa.finalize()
    running = session.current()
    assert running is not None
    states = {site.target: site.state for site in running.report()}
    print(json.dumps({"beside": [each.as_dict() for each in running.beside()], "states": states}))


if __name__ == "__main__":
    main(*sys.argv[1:])
