"""Worker functions: training on packed documents, and on the same documents one by one."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.context_parallel.packs import Pack
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.dsa import core_attention
from tests.features.dsa.cp_cases import logged_indexer_loss
from tests.support import model as job

LENGTHS = (5, 17, 1, 40, 9)
PADDING = 8


def tokens_of(lengths: Sequence[int], padding: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random tokens and labels, ``[1, rows]``."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(0, job.VOCABULARY, (1, sum(lengths) + padding), generator=generator) for _ in range(2)
    )


def prefix_sums(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def described(lengths: Sequence[int], rows: int) -> Any:
    """Return Megatron's ``PackedSeqParams`` for these lengths, empty documents included."""
    from megatron.core.packed_seq_params import PackedSeqParams

    sums = prefix_sums(lengths)
    # Padding at the end counts to the last document's place, as in Megatron's description.
    places, longest = None, max(lengths)
    if rows > sums[-1]:
        places = torch.cat([sums[:-1], torch.tensor([rows])]).int()
        longest = int(places.diff().max())
    return PackedSeqParams("thd", sums, sums, places, places, max_seqlen_q=longest, max_seqlen_kv=longest)


def one_pass(
    packed: bool,
    lengths: Sequence[int] = LENGTHS,
    padding: int = PADDING,
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    builder: str = "tests.support.model",
    config: str = "config",
    mtp: bool = False,
) -> dict[str, Any]:
    """Return loss, gradients and the logged indexer loss, for one pack or for its documents one by one."""
    job.start({"use_fused_dsa": True, **(switches or {})})
    build, rows, count = import_module(builder), sum(lengths) + padding, sum(lengths)
    tokens, labels = tokens_of(lengths, padding)
    cfg = getattr(build, config)(**(overrides or {}))
    with mock.patch.object(job, "SEQUENCE", rows):
        # The model is built for the length of the pack.
        model = build.gpt_model(cfg, **({"mtp": True} if mtp else {}))
    logged, losses = 0.0, []
    parts = [(slice(0, rows), count)] if packed else []
    if not packed:
        ends = prefix_sums(lengths).tolist()
        # Empty documents make no microbatch.
        parts = [(slice(a, b), b - a) for a, b in itertools.pairwise(ends) if b > a]
    for part, counted in parts:
        positions = torch.arange(part.stop - part.start)[None]
        # Each document's indexer loss counts by its share of the tokens, as in the pack.
        scale_indexer_loss(counted / count)
        inputs = tokens[:, part], positions, None
        arguments = {"packed_seq_params": described(lengths, rows)} if packed else {}
        out = model(*inputs, labels=labels[:, part], **arguments)[0, :counted]
        losses.append(out.detach())
        # The mean over all tokens, accumulated document by document.
        (out.sum() / count).backward()
        logged += logged_loss() * counted / count
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"losses": torch.cat(losses), "gradients": gradients, "indexer loss": logged}


def logged_loss() -> float:
    try:
        return logged_indexer_loss(1)
    except KeyError:  # no layer logged a loss
        return 0.0


def scale_indexer_loss(factor: float) -> None:
    from mindspeed_dsa.features.dsa.indexer_loss import indexer_loss

    indexer_loss(Megatron()).scale.set_loss_scale(torch.tensor(factor))


def told(all_lengths: Sequence[Sequence[int]], padding: int) -> list[tuple[Any, ...]]:
    """Return packs with and without padding, each read back from its ``PackedSeqParams``, and the last
    bound.
    """
    results = []
    for lengths, more in itertools.product(all_lengths, (0, padding)):
        pack = Pack.of(
            SimpleNamespace(qkv_format="thd", cu_seqlens_q=prefix_sums(lengths)), sum(lengths) + more
        )
        params = pack.params(Megatron(), torch.device("cpu"))
        places = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        results.append((pack, Pack.of(params, pack.length), int(places[-1]), places.dtype))
    return results


END = 3
"""Token that ends a document."""


def batches(from_tokens: bool, packs: int = 2) -> list[dict[str, Tensor]]:
    """Return collated packs; document lengths come in separate tensors or from end tokens."""
    collated = []
    for seed in range(packs):
        # Rotated lengths, so that the packs differ.
        lengths = LENGTHS[seed:] + LENGTHS[:seed]
        tokens, labels = tokens_of(lengths, 0 if from_tokens else PADDING, seed)
        mask = torch.ones(tokens.shape)
        mask[:, sum(lengths) :] = 0
        batch = {"tokens": tokens, "labels": labels, "loss_mask": mask}
        if from_tokens:
            # No end token inside of a document.
            tokens[tokens == END] = END + 1
            tokens[:, prefix_sums(lengths)[1:] - 1] = END
        else:
            batch |= {"cu_seqlens": prefix_sums(lengths)[None], "max_seqlen": torch.tensor([max(lengths)])}
        collated.append(batch)
    return collated


def one_by_one(packs: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return each document as a separate microbatch."""
    microbatches = []
    for seed, batch in enumerate(packs):
        ends = prefix_sums(LENGTHS[seed:] + LENGTHS[:seed]).tolist()
        for begin, end in itertools.pairwise(ends):
            part = {key: batch[key][:, begin:end] for key in ("tokens", "labels", "loss_mask")}
            microbatches.append(part)
    return microbatches


def scripted_step(
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    from_tokens: bool = False,
    alone: bool = False,
    builder: str = "tests.support.model",
    by_run: bool = False,
    mtp: bool = False,
    cut: bool = False,
    config: str = "config",
    **layout: Any,
) -> dict[str, Any]:
    """Return gradients of two packs from a script that, like ``pretrain_gpt.py``, does not pass lengths on.

    With ``alone``, each document is a microbatch. With ``by_run``, the operators get rows run by run, as on
    NPUs. With ``cut``, the script itself cuts each document for context parallel ranks and passes the cut's
    description.
    """
    cp = layout.get("cp", 1)
    parallel = {"context_parallel_size": cp} if cp > 1 else {}
    comm_type = "allgather" if config == "config" else "p2p"
    packing = {"pack_documents": not alone and not cut}
    job.start({"use_fused_dsa": True, **packing, **parallel, **(switches or {})}, **layout)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel as Wrapped
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tp, pp, vpp = layout.get("tp", 1), layout.get("pp", 1), layout.get("vpp")
    build = import_module(builder)
    cfg = getattr(build, config)(
        **{"num_layers": 4, **(overrides or {})},
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        calculate_per_token_loss=True,
        **({**parallel, "cp_comm_type": comm_type} if parallel else {}),
    )
    cfg.finalize_model_grads_func = finalize_model_grads
    # Each document needs two chunks per context parallel rank.
    packs = in_places(batches(from_tokens), 2 * cp) if cut else batches(from_tokens)
    data = one_by_one(packs) if alone else packs
    # Only these ranks read data, as in Megatron-LM.
    reads = parallel_state.get_tensor_model_parallel_rank() == 0 and (
        parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    )
    rows = packs[0]["tokens"].size(1)
    runs = mock.patch.object(core_attention, "in_runs", return_value=by_run)
    with mock.patch.object(job, "SEQUENCE", rows), end_of_documents(), runs:
        heads = {"mtp": True} if mtp else {}
        chunks = [build.gpt_model(cfg, vp_stage=stage if vpp else None, **heads) for stage in range(vpp or 1)]
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        wrapped = [
            Wrapped(cfg, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
        ]
        iterators = [OnlyNext(iter(data)) if reads else None for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=partial(script_step, cfg),
            data_iterator=iterators if vpp else iterators[0],
            model=wrapped if vpp else wrapped[0],
            num_microbatches=len(data),
            seq_length=rows,
            micro_batch_size=1,
            forward_only=False,
        )
    return {
        "gradients": job.gradients(chunks),
        "split": job.split_dimensions(chunks),
        "context": parallel_state.get_context_parallel_rank(),
    }


def in_places(packs: list[dict[str, Tensor]], unit: int) -> list[dict[str, Tensor]]:
    """Pad each document to a multiple of ``unit`` rows."""
    padded = []
    for batch in packs:
        sums = batch["cu_seqlens"].flatten()
        # -(n // -unit) is n / unit, rounded up.
        rooms = torch.cat([sums[:1], (-(sums.diff() // -unit) * unit).cumsum(0).int()])
        rows = torch.cat(
            [torch.arange(n) + at for at, n in zip(rooms.tolist(), sums.diff().tolist(), strict=False)]
        )
        placed = {
            name: batch[name].new_zeros(1, int(rooms[-1])) for name in ("tokens", "labels", "loss_mask")
        }
        for name, whole in placed.items():
            # Rows of padding keep zeros, also in the loss mask.
            whole[:, rows] = batch[name][:, : int(sums[-1])]
        padded.append({**placed, "sums": sums, "places": rooms})
    return padded


def cut_documents(batch: dict[str, Tensor]) -> Any:
    """Keep this rank's two chunks of each padded document, as Transformer Engine does; return the
    description.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    sums, places = batch["sums"], batch["places"]
    kept_rows = []
    for begin, end in itertools.pairwise(places.tolist()):
        chunks = torch.arange(begin, end).chunk(2 * ranks)
        # Zigzag: chunks r and 2 * ranks - 1 - r of every document.
        kept_rows += [chunks[rank], chunks[2 * ranks - 1 - rank]]
    for name in ("tokens", "labels", "loss_mask"):
        batch[name] = batch[name][:, torch.cat(kept_rows)]
    longest = int(places.diff().max())
    return PackedSeqParams("thd", sums, sums, places, places, max_seqlen_q=longest, max_seqlen_kv=longest)


class OnlyNext:
    """Iterator without ``__iter__``, like Megatron-LM's ``RerunDataIterator``."""

    def __init__(self, data: Iterator[dict[str, Tensor]]) -> None:
        self._data = data

    def __next__(self) -> dict[str, Tensor]:
        return next(self._data)


def script_step(cfg: Any, data: Iterator[dict[str, Tensor]] | None, model: Any) -> Any:
    """Run a forward step that reads data on tensor parallel rank 0 of the outer stages and broadcasts it."""
    # The step does not know about packs, like Megatron's pretraining scripts.
    from megatron.core import parallel_state, utils

    group = parallel_state.get_tensor_model_parallel_group()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    received = [next(data) if data is not None else None]
    dist.broadcast_object_list(received, src=source, group=group)
    # Middle stages of a pipeline have no batch.
    batch = received[0] or dict.fromkeys(("tokens", "labels", "loss_mask"))
    arguments = {}
    if "places" in batch:
        arguments["packed_seq_params"] = cut_documents(batch)
    elif parallel_state.get_context_parallel_world_size() > 1:
        batch = utils.get_batch_on_this_cp_rank(batch)
    assert not {"cu_seqlens", "max_seqlen"} & batch.keys(), "the script would read these wrongly"
    # Multi-token prediction rolls position_ids too, although the model does not read them.
    positions = None if batch["tokens"] is None else torch.zeros_like(batch["tokens"])
    out = model(batch["tokens"], positions, None, labels=batch["labels"], **arguments)
    return out, partial(job.loss_of, cfg, batch["loss_mask"])


@contextlib.contextmanager
def end_of_documents() -> Iterator[None]:
    """Install a fake global tokenizer of Megatron-LM, because the installed wheel has none."""
    tokenizer = ModuleType("megatron.training.global_vars")
    tokenizer.get_tokenizer = lambda: SimpleNamespace(eod=END)  # type: ignore[attr-defined]
    packages = {"megatron.training": ModuleType("megatron.training"), tokenizer.__name__: tokenizer}
    sys.modules.update(packages)
    try:
        yield  # modules imported in the block stay imported, and stay patched
    finally:
        for name in packages:
            del sys.modules[name]
