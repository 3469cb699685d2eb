"""Worker functions: DSA on context parallel ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mindspeed_dsa.context_parallel.layout import Zigzag
from tests.support import model as job

SEQUENCE = 24  # two chunks for each of two, three or four ranks


@contextlib.contextmanager
def context_parallel(builder: ModuleType, cp: int) -> Iterator[None]:
    """Make ``builder``'s models use ``cp`` context parallel ranks and a sequence length they divide."""
    build_config = builder.config

    def config(**overrides: Any) -> Any:
        return build_config(**{**overrides, "context_parallel_size": cp})

    with mock.patch.object(job, "SEQUENCE", SEQUENCE), mock.patch.object(builder, "config", config):
        yield


def positions_in_blocks(rows: int) -> Callable[..., Tensor]:
    """Return :func:`job.own_positions` for tokens that are distributed in blocks."""

    def own_positions(length: int | None = None) -> Tensor:
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        return Zigzag(group.size(), rows).rows_of_rank(group.rank(), length or job.SEQUENCE)

    return own_positions


@contextlib.contextmanager
def parts_kept_apart() -> Iterator[list[int]]:
    """Keep queries and keys in two parts, as the operators on Ascend need them.

    Yields a list with the number of parts of each gathered key.
    """
    from mindspeed_dsa.context_parallel.key_exchange import KeyExchange
    from mindspeed_dsa.features.dsa import absorb, operands
    from mindspeed_dsa.features.dsa.kernel_hooks import shared_keys

    gathered: list[int] = []
    hand_over = KeyExchange.hand_over

    def noting(self: Any, *parts: Tensor) -> Tensor:
        gathered.append(len(parts))
        return hand_over(self, *parts)

    with contextlib.ExitStack() as patches:
        # Every module that decides by device whether the parts stay apart.
        for module in (operands, absorb, shared_keys):
            patches.enter_context(mock.patch.object(module, "keeps_parts_apart", return_value=True))
        patches.enter_context(mock.patch.object(KeyExchange, "hand_over", noting))
        yield gathered


def step_in_parts(cp: int, parts: int, **arguments: Any) -> dict[str, Any]:
    """Run :func:`step` with keys gathered in ``parts`` parts."""
    with parts_kept_apart() as gathered:
        result = step(cp, **arguments)
    assert set(gathered) == {parts}
    return result


def step(
    cp: int,
    num_microbatches: int = 2,
    switches: Mapping[str, Any] | None = None,
    by_run: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Run :func:`job.run` and return the logged indexer loss, too; ``by_run`` as on Ascend."""
    from mindspeed_dsa.features.dsa import core_attention

    switches = {**(switches or {}), "context_parallel_size": cp}
    rows, own_positions = switches.get("cp_block_rows", 0), job.own_positions
    if rows:
        own_positions = positions_in_blocks(rows)
    runs = mock.patch.object(core_attention, "in_runs", return_value=by_run)
    with context_parallel(job, cp), mock.patch.object(job, "own_positions", own_positions), runs:
        result = job.run(switches, num_microbatches=num_microbatches, micro_batch_size=2, cp=cp, **arguments)
    # Without the loss, nothing is logged.
    if (arguments.get("overrides") or {}).get("dsa_indexer_loss_coeff", 1) == 0:
        return {**result, "indexer loss": 0.0}
    return {**result, "indexer loss": logged_indexer_loss(num_microbatches)}


def losses_of_late_weights(cp: int, builder: str, **switches: Any) -> list[Tensor]:
    """Return a rank's token loss and indexer loss, with weights present and with weights that arrive late."""
    made = import_module(builder)
    with context_parallel(made, cp):
        job.start({"use_fused_dsa": True, "context_parallel_size": cp, **switches}, cp=cp)
        model = made.gpt_model(made.config())
        losses = []
        for late in (False, True):
            if late:
                # Weights arrive in forward pre-hooks, like FSDP's gathered parameters.
                _send_for(model)
            tokens = job.per_token_loss(model, job.samples(2))
            losses.append(torch.stack([tokens.mean().detach(), torch.tensor(logged_indexer_loss(1))]))
    return losses


@torch.no_grad()
def _send_for(model: Any) -> None:
    """Make all weights NaN until their modules' forward pre-hooks, as in overlapped gathering."""
    for module in model.modules():
        weights = list(module.parameters(recurse=False))
        kept = [weight.clone() for weight in weights]

        def arrive(*unused: Any, weights: Any = weights, kept: Any = kept) -> None:
            with torch.no_grad():
                for weight, value in zip(weights, kept, strict=True):
                    weight.copy_(value)

        for weight in weights:
            weight.fill_(float("nan"))
        module.register_forward_pre_hook(arrive)


def logged_indexer_loss(num_microbatches: int) -> float:
    from mindspeed_dsa.feature import Megatron
    from mindspeed_dsa.features.dsa.indexer_loss import indexer_loss

    losses: dict[str, Tensor] = {}
    tracker = indexer_loss(Megatron()).tracker
    # The tracker holds a sum over microbatches.
    tracker.track_indexer_metrics(1 / num_microbatches, 1, None, total_loss_dict=losses)
    return float(losses["indexer loss"])


def rotated(cp: int, rope_type: str) -> dict[str, Tensor]:
    """Return a rank's rows of random states after MLA's rotation, and their positions."""
    job.start({"use_fused_dsa": True}, cp=cp)
    from mindspeed_dsa.feature import Megatron
    from mindspeed_dsa.megatron.mla_projections import Projections

    attention = job.gpt_model(job.config(rope_type=rope_type)).decoder.layers[0].self_attention
    states, positions = seeded(SEQUENCE, 2, 4, 8), job.own_positions(SEQUENCE)
    rotate = Projections(attention, Megatron()).rotation(positions.numel())
    return {"positions": positions, "rows": rotate(states[positions])}


def backport_indexer(cp: int, rope_type: str) -> dict[str, Tensor]:
    """Return a rank's rows of the backported indexer's projections, and their positions."""
    job.start({"use_fused_dsa": True}, cp=cp)
    return index_rows(backport_spec().submodules.indexer, job.config(rope_type=rope_type))


def backport_spec() -> Any:
    """Return the core attention spec for older releases, with default options."""
    from mindspeed_dsa import session
    from mindspeed_dsa.feature import Megatron
    from mindspeed_dsa.features.dsa.backport.attention import core_attention_spec
    from mindspeed_dsa.features.dsa.backport.feature import Options

    settings, _ = session.resolve({}, ())
    return core_attention_spec(Options.of(settings), Megatron())


def index_rows(spec: Any, cfg: Any) -> dict[str, Tensor]:
    from megatron.core.transformer.spec_utils import build_module

    torch.manual_seed(0)
    indexer = build_module(spec, config=cfg)
    positions = job.own_positions(SEQUENCE)
    x, qr = seeded(SEQUENCE, 2, cfg.hidden_size), seeded(SEQUENCE, 2, cfg.q_lora_rank)
    query, key, weights = indexer.forward_before_topk(x[positions], qr[positions])
    # All projections side by side, [rows, batch, width].
    return {"positions": positions, "rows": torch.cat([query.flatten(2), key, weights], dim=-1).detach()}


def seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def in_order(ranks: list[Mapping[str, Tensor]]) -> Tensor:
    """Join all ranks' rows in sequence order."""
    rows = torch.cat([rank["rows"] for rank in ranks])
    # Sorting by position restores the sequence.
    return rows[torch.cat([rank["positions"] for rank in ranks]).argsort()]


def dtypes_of_parts(by_run: bool) -> list[str]:
    """Return the dtypes of a bf16 model's key gradients when their sum over ranks starts."""
    from mindspeed_dsa.context_parallel.gather import _Transfer

    dtypes: list[str] = []
    start_sum = _Transfer.start_sum

    def noting(self: Any, gradient: Tensor) -> None:
        dtypes.append(str(gradient.dtype))
        start_sum(self, gradient)

    narrow = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
    overrides = {"num_layers": 1, **job.WITHOUT_EXPERTS, **narrow}
    with mock.patch.object(_Transfer, "start_sum", noting):
        step(2, 1, {"use_fused_dsa": True}, by_run, overrides=overrides)
    return dtypes


def order_of_a_layer(**switches: Any) -> list[str]:
    """Return the order of a layer's key transfers and projections on two ranks."""
    from mindspeed_dsa.context_parallel.gather import _Transfer

    events: list[str] = []
    steps = {
        "start": "key {} starts",
        "hand_out": "key {} is needed",
        "start_again": "key {} starts again",
        "start_sum": "gradient {} starts",
        "summed": "gradient {} is needed",
    }
    # Transfers are named by the width of their key: the main key's differs from the indexer's.
    widths: dict[int, int] = {}

    def telling(name: str) -> Callable[..., Any]:
        original = getattr(_Transfer, name)

        def tell(self: Any, *args: Any) -> Any:
            if name == "start":
                widths[id(self)] = args[0].size(-1)
            event = steps[name].format(widths[id(self)])
            if event not in events:  # a transfer that was started early is started only once
                events.append(event)
            return original(self, *args)

        return tell

    build = job.gpt_model

    def gpt_model(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        for name, module in model.named_modules():
            last = name.rpartition(".")[2]
            if last in ("linear_q_up_proj", "linear_wq_b", "linear_proj"):
                # Forward and backward of the projections next to the transfers.
                module.register_forward_hook(lambda m, i, o, n=last: events.append(n))
                module.weight.register_hook(lambda g, n=last: events.append(f"{n} backward"))
        return model

    with contextlib.ExitStack() as patches:
        for name in steps:
            patches.enter_context(mock.patch.object(_Transfer, name, telling(name)))
        patches.enter_context(mock.patch.object(job, "gpt_model", gpt_model))
        step(2, 1, {"use_fused_dsa": True, **switches}, overrides={"num_layers": 1, **job.WITHOUT_EXPERTS})
    return events
