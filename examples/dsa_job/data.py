"""Batches: Megatron's GPTDataset over the indexed file, in an order that depends only on the seed."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from dsa_job.errors import UsageError
from dsa_job.text import Corpus, build, check_size, digest, find_text
from dsa_job.tokenizers import Tokenizer
from mindspeed_dsa.runs.files import lock

Batch = Mapping[str, torch.Tensor]


def build_corpus(args: argparse.Namespace, tokenizer: Tokenizer) -> Corpus:
    """Index the text, or take it from the cache."""
    try:
        return build(find_text(args.data), tokenizer, Path(args.data_cache_path))
    except OSError as error:
        raise UsageError(
            f"the indexed file cannot be written below {args.data_cache_path}: {error}"
        ) from error


def build_datasets(
    args: argparse.Namespace, tokenizer: Tokenizer, corpus: Corpus
) -> tuple[GPTDataset, GPTDataset | None]:
    """Return training and held-out data; every document is in one of them."""
    samples = max(args.train_iters, 1) * args.global_batch_size
    heldout_samples = args.eval_iters * args.global_batch_size
    cache = Path(args.data_cache_path)
    # Megatron's index files look complete even if a process is killed while it writes them. They only count
    # with the marker, which is written last.
    key = json.dumps([corpus.prefix, args.seq_length, args.split, args.seed, samples, heldout_samples])
    indices = cache / f"indices-{digest(key)}"
    marker = indices / "complete"
    check_size(args.split, args.seq_length, corpus.tokens)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([corpus.prefix], None),
        split=args.split,
        tokenizer=tokenizer,
        path_to_cache=str(indices),
        reset_position_ids=args.pack_documents,
        reset_attention_mask=False,
        eod_mask_loss=args.pack_documents,
        create_attention_mask=False,
    )
    logging.getLogger("megatron.core.datasets").setLevel(logging.ERROR)
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, [samples, heldout_samples, None], lambda: True, config
    )
    if dist.get_rank() == 0:
        with lock(cache / ".lock"):  # other jobs share the folder
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


class MicrobatchOrder:
    """Sample indices of this rank's next microbatches; an endless batch sampler.

    A global batch is the same in every layout: microbatch after microbatch, and within a microbatch one data
    parallel rank after the other. All ranks together have already used ``consumed`` of ``length`` samples.
    """

    def __init__(self, length: int, consumed: int, micro_batch_size: int, rank: int, ranks: int) -> None:
        self._length = length
        self._next = consumed + rank * micro_batch_size
        self._size = micro_batch_size
        # With 2 ranks and microbatches of 4, rank 1 takes samples 4 to 7, then 12 to 15.
        self._stride = micro_batch_size * ranks

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [index % self._length for index in range(self._next, self._next + self._size)]
            self._next += self._stride


def batches(
    args: argparse.Namespace, dataset: GPTDataset, consumed: int, chunks: int
) -> list[Iterator[Batch]]:
    """Return one iterator of microbatches per model chunk of this rank, all over the same samples.

    Tensors are ``[micro_batch_size, seq_length]``: int64, and ``loss_mask`` in float32. With
    ``--pack-documents`` a microbatch has one sample, and ``cu_seqlens`` has the ends of its documents.
    """
    place = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    orders = [MicrobatchOrder(len(dataset), consumed, args.micro_batch_size, *place) for _ in range(chunks)]
    # Without its own generator the loader would draw a seed from dropout's generator, and a resumed run would
    # differ from an uninterrupted one.
    loaders = [
        torch.utils.data.DataLoader(dataset, batch_sampler=order, generator=torch.Generator())
        for order in orders
    ]
    end = dataset.config.tokenizer.eod
    return [
        map(partial(with_lengths, end=end), each) if args.pack_documents else iter(each) for each in loaders
    ]


def with_lengths(batch: Batch, end: int) -> Batch:
    """Add the prefix sums ``[1, documents + 1]`` of the documents' lengths to a batch.

    Args:
        batch: batch of one sample.
        end: token that ends a document.
    """
    tokens = batch["tokens"].flatten()
    # Ends at tokens 2 and 5 of 8 make [0, 3, 6, 8]; the last document need not end.
    sums = [0, *((tokens == end).nonzero().flatten() + 1).tolist(), len(tokens)]
    return {**batch, "cu_seqlens": torch.tensor([sums], dtype=torch.int32)}
