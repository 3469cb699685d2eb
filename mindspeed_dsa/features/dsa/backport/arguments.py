"""DSA's flags in Megatron-LM's parser, where it lacks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--experimental-attention-variant", {"choices": ["dsa"], "help": "Kind of attention: dsa."}),
    ("--dsa-indexer-n-heads", {"type": int, "help": "Number of indexer heads."}),
    ("--dsa-indexer-head-dim", {"type": int, "help": "Dimension of each indexer head."}),
    ("--dsa-indexer-topk", {"type": int, "help": "Number of keys that each query attends to."}),
    (
        "--dsa-indexer-loss-coeff",
        {"type": float, "help": "Coefficient of the indexer loss; unset or 0: no loss."},
    ),
    (
        "--dsa-indexer-use-sparse-loss",
        {
            "action": "store_true",
            "help": "Compute the indexer loss over the selected keys only, not over all visible ones.",
        },
    ),
)


def with_dsa_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``megatron.training.arguments.parse_args`` through its own extension point."""

    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def provider(parser: Any) -> Any:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return add_dsa_flags(parser)

        return original(provider, *args, **kwargs)

    return parse_args


def add_dsa_flags(parser: Any) -> Any:
    """Add the flags that an argparse parser lacks, under Megatron's names; a fork may have some."""
    missing = [(name, options) for name, options in FLAGS if name not in parser._option_string_actions]
    if missing:
        group = parser.add_argument_group(title="DeepSeek sparse attention")
        for name, options in missing:
            group.add_argument(name, **options)
    return parser
