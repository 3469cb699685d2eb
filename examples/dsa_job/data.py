"""Batches: Megatron's GPTDataset over the indexed file, in an order that depends on the seed only."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from dsa_job.corpus import Corpus, build, check_size, find_text
from dsa_job.errors import UsageError
from dsa_job.files import file_lock
from dsa_job.order import MicrobatchOrder
from dsa_job.tokenizer import Tokenizer

Batch = Mapping[str, torch.Tensor]


def build_corpus(args: argparse.Namespace, tokenizer: Tokenizer) -> Corpus:
    """Build the indexed file on rank 0 while the others wait, and tell all of them about it.

    Raises:
        UsageError: on every rank, if rank 0 could not build it.
    """
    result: list[Corpus | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            result[0] = build(find_text(args.data), tokenizer, Path(args.data_cache_path))
        except UsageError as error:
            result[0] = str(error)
        except OSError as error:
            result[0] = f"the indexed file cannot be written below {args.data_cache_path}: {error}"
    dist.broadcast_object_list(result, src=0)
    if not isinstance(result[0], Corpus):
        raise UsageError(str(result[0]))
    return result[0]


def build_datasets(
    args: argparse.Namespace, tokenizer: Tokenizer, corpus: Corpus
) -> tuple[GPTDataset, GPTDataset | None]:
    """Training and held-out data; documents are on one side or the other.

    Raises:
        UsageError: one side is too small for a single sequence.
    """
    samples = max(args.train_iters, 1) * args.global_batch_size
    heldout_samples = args.eval_iters * args.global_batch_size
    cache = Path(args.data_cache_path)
    # A process that is killed while Megatron writes its index files leaves some that look complete;
    # they only count when the marker that is written last is there.
    key = json.dumps([corpus.prefix, args.seq_length, args.split, args.seed, samples, heldout_samples])
    indices = cache / f"indices-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}"
    marker = indices / "complete"
    check_size(args.split, args.seq_length, corpus.tokens)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([corpus.prefix], None),
        split=args.split,
        tokenizer=tokenizer,
        path_to_cache=str(indices),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    logging.getLogger("megatron.core.datasets").setLevel(logging.ERROR)
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, [samples, heldout_samples, None], lambda: True, config
    )
    if dist.get_rank() == 0:
        # The folder is shared: another job may be about to look at it, or in the middle of filling it.
        with file_lock(cache / ".lock"):
            if not marker.exists():
                shutil.rmtree(indices, ignore_errors=True)
            train, heldout, _ = builder.build()
            marker.touch()
    else:
        train, heldout, _ = builder.build()
    if train is None or (heldout is None and args.eval_iters):
        raise UsageError(
            f"--split {args.split} leaves training or held-out data empty; use weights such as 95,5"
        )
    return train, heldout if args.eval_iters else None


def batches(
    args: argparse.Namespace, dataset: GPTDataset, consumed: int, chunks: int
) -> list[Iterator[Batch]]:
    """One iterator of microbatches per model chunk of this rank, all over the same samples.

    Each batch holds ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), all
    ``[micro_batch_size, seq_length]``.
    """
    order = (
        len(dataset),
        consumed,
        args.micro_batch_size,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    # The loader draws a seed from its generator; without one of its own it would take it from the
    # generator that dropout uses, and a resumed run would differ from an unbroken one.
    return [
        iter(
            torch.utils.data.DataLoader(
                dataset, batch_sampler=MicrobatchOrder(*order), generator=torch.Generator()
            )
        )
        for _ in range(chunks)
    ]
