"""Command line of the job: Megatron's flag names, with defaults that fit two CPU cores and two minutes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

import mindspeed_dsa
from dsa_job.errors import UsageError
from dsa_job.flags import GROUPS
from mindspeed_dsa import features, platforms, session
from mindspeed_dsa.megatron.pipeline_chunks import stages_of


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line and derive dependent arguments.

    Environment variables of the library override the command line, including Megatron's own flags.

    Raises:
        UsageError: the command line is invalid.
    """
    args = build_parser().parse_args(argv)
    mindspeed_dsa.apply_environment(args)
    derive(args)
    return args


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all groups, including the library's feature flags."""
    parser = _Parser(
        prog="pretrain_dsa.py",
        description="Train a small DeepSeek-V3.2-shaped model with sparse attention on real text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            flag.add_to(group)
    mindspeed_dsa.add_arguments(parser)
    return parser


class _Parser(argparse.ArgumentParser):
    """Parser that raises UsageError, and suggests flags similar to an unknown one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        flags = [token.partition("=")[0] for token in unknown if token.startswith("-")]
        if flags:
            raise UsageError([self._unknown_flag(flag) for flag in flags])
        if unknown:
            raise UsageError(
                f"{unknown[0]!r} belongs to no flag; values follow their flag, as in --data {unknown[0]}"
            )
        return parsed

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _unknown_flag(self, flag: str) -> str:
        near = difflib.get_close_matches(flag, self._option_string_actions, n=3, cutoff=0.6)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; omit it: --help lists all flags"
        hint += "".join(f" ({plugin.message})" for plugin in features.broken_plugins())
        return f"{flag} is no flag of this job{hint}"


def derive(args: argparse.Namespace) -> None:
    """Fill in arguments that follow from other flags; in place, idempotent."""
    if args.experimental_attention_variant == "none":
        args.experimental_attention_variant = None
        args.use_fused_dsa = False
    for name in ("num_moe_experts", "moe_shared_expert_intermediate_size", "mtp_num_layers"):
        setattr(args, name, getattr(args, name) or None)
    if args.num_moe_experts and args.moe_layer_freq is None:
        args.moe_layer_freq = [0] + [1] * (args.num_layers - 1)
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16
    args.accumulate_allreduce_grads_in_fp32 &= not args.grad_reduce_in_bf16
    if args.lr_warmup_iters is None:
        args.lr_warmup_iters = max(0, min(10, (args.lr_decay_iters or args.train_iters) // 10))
    if args.deterministic_mode is None:  # before validation: features require it
        args.deterministic_mode = _platform(args) == "cpu"
    args.virtual_pipeline_model_parallel_size = _virtual_stages(args)
    if args.virtual_pipeline_model_parallel_size is None:
        # Only the interleaved schedule can overlap point-to-point communication or align the stages.
        args.overlap_p2p_comm = False
        args.align_param_gather = False


def _platform(args: argparse.Namespace) -> str:
    """Return the session's platform or, without a session, the flag's."""
    running = session.current()
    return platforms.detect(args.mindspeed_platform) if running is None else running.settings.platform


def _virtual_stages(args: argparse.Namespace) -> int | None:
    """Return the number of model chunks per pipeline rank, ``None`` without interleaving."""
    pp = args.pipeline_model_parallel_size
    if args.schedules_method == "dualpipev":
        return 2 if pp > 1 else None
    if args.pipeline_model_parallel_layout is not None and pp > 1:
        with contextlib.suppress(ValueError):  # validation reports it
            chunks = len(stages_of(args.pipeline_model_parallel_layout)) // pp
            return chunks if chunks > 1 else None
    chunks = args.num_virtual_stages_per_pipeline_rank
    per_chunk = args.num_layers_per_virtual_pipeline_stage
    if chunks is None and per_chunk:
        chunks = args.num_layers // max(1, pp * per_chunk)
    return chunks if chunks and chunks > 1 else None
