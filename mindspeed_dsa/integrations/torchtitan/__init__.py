"""Integration into TorchTitan: converters that make its models use our sparse attention, norms and experts.

TorchTitan's mechanism for converters differs between releases. This package provides the converters for the
installed release. See docs/hosts/torchtitan.md.

* :data:`BY_MODEL`: converters of built models, named in ``[model] converters``. Importing this package
  registers them, which ``[experimental] custom_import`` does.
* :data:`BY_CONFIG`: converters of configurations: :func:`build` for a ``config_registry``, and
  :func:`converters` for the command line. :func:`npu_swap_optimizer` is for both.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.integrations.torchtitan.latent_attention import indexer_losses
from mindspeed_dsa.integrations.torchtitan.names import CONVERTERS, SparseOptions

__all__ = ["BY_CONFIG", "BY_MODEL", "CONVERTERS", "SparseOptions", "indexer_losses"]

BY_MODEL, BY_CONFIG = SpecifierSet(">=0.2.2,<0.3"), SpecifierSet(">=0.3,<0.4")
"""Releases with each mechanism. For a checkout without a release, the module that implements it decides."""


def _served(releases: SpecifierSet, part: str) -> bool:
    """Return whether the installed TorchTitan has module ``part``, and is in ``releases`` or a checkout."""
    try:
        release = version("torchtitan")
    except PackageNotFoundError:
        release = ""
    there = find_spec("torchtitan") is not None and find_spec(part) is not None
    return there and (not release or releases.contains(release, prereleases=True))


if _served(BY_CONFIG, "torchtitan.config.override"):
    from mindspeed_dsa.integrations.torchtitan.by_config import build, convert_in_place
    from mindspeed_dsa.integrations.torchtitan.config_converters import swapped_optimizers
    from mindspeed_dsa.integrations.torchtitan.swapped_moments import DEFAULT_TIMES
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.override import override
    from torchtitan.protocols.model import BaseModel

    __all__ += ["build", "converters", "npu_swap_optimizer"]

    @override(target=BaseModel.Config, description="mindspeed_dsa")  # type: ignore[untyped-decorator]
    def converters(model: Any, *, names: list[str], rows_per_step: int | None = None, **options: Any) -> Any:
        """Apply converters to the model. Called by ``--override.imports``, with the arguments as JSON.

        Args:
            model: model's configuration, changed in place because the trainer already holds it.
            names: names of converters, in the order in which they are applied.
            rows_per_step: number of tokens of an optimizer step on all ranks, over which the indexer's loss
                is averaged.
            **options: options of sparse attention, see :class:`SparseOptions`.
        """
        convert_in_place(model, names, rows_per_step, **options)
        return model

    @override(target=OptimizersContainer.Config, description="mindspeed_dsa")  # type: ignore[untyped-decorator]
    def npu_swap_optimizer(optimizer: Any, *, times: int = DEFAULT_TIMES) -> Any:
        """Return a configuration of the same optimizers with Adam's moments on the host.

        For a ``config_registry``: ``config.optimizer = npu_swap_optimizer(config.optimizer)``. Also called by
        ``--override.imports``.

        Args:
            optimizer: TorchTitan's configuration of optimizers.
            times: number N of parts of a step; the parts on the device take at most 3 / N of the moments.
        """
        return swapped_optimizers(optimizer, times)

elif _served(BY_MODEL, "torchtitan.protocols.model_converter"):
    from mindspeed_dsa.integrations.torchtitan.by_model import register

    register()
else:
    try:
        has = f"TorchTitan {version('torchtitan')}"
    except PackageNotFoundError:
        has = "no TorchTitan"
    raise ImportError(
        f"mindspeed_dsa.integrations.torchtitan serves TorchTitan {BY_MODEL} and {BY_CONFIG}; here is {has}. "
        "pip install 'mindspeed_dsa[torchtitan]'"
    )
