"""Replacements where Megatron requires Transformer Engine.

Imports nothing of Megatron: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.repairs.local_provider.feature import Options
from mindspeed_dsa.features.dsa.repairs.local_provider.spec_provider import local_spec_provider
from mindspeed_dsa.megatron.local_modules import duplicated_linear


def full_copy_linear(context: Context[Options]) -> type:
    """The class that MLA gets under the name ``Linear``."""
    return duplicated_linear(context.megatron)


def provide_local_modules(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``_get_backend_spec_provider``: ``transformer_impl="local"`` gets our provider."""

    def _get_backend_spec_provider(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.transformer_impl != "local":
            return original(config, *args, **kwargs)
        return local_spec_provider(context.megatron, context.options.groups_experts)()

    return _get_backend_spec_provider
