"""Megatron's optimizer and its schedule of learning rate and weight decay."""

from __future__ import annotations

import argparse

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from dsa_job.model import from_args


def build_optimizer(args: argparse.Namespace, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """The optimizer that the flags describe."""
    return get_megatron_optimizer(from_args(OptimizerConfig, args), model)


def build_scheduler(args: argparse.Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule, counted in samples as Megatron does."""
    batch = args.global_batch_size
    steps = max(args.train_iters, 1)
    decay_steps = args.lr_decay_iters or steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=min(args.lr_warmup_iters, decay_steps - 1) * batch,
        lr_decay_steps=decay_steps * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=steps * batch,
        wd_incr_style="constant",
    )
