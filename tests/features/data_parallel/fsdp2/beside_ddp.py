"""Worker functions: DDP and FSDP2 on the same steps, and checkpoints between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from mindspeed_dsa.features.data_parallel.fsdp2.feature import FEATURE
from mindspeed_dsa.features.data_parallel.fsdp2.wrapper import CheckedGradients
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.patches.errors import SettingsError
from tests.support.contexts import running
from tests.support.model import DSA_ON, gpt_model, start
from tests.support.optimizer_job import PLAIN, assemble, load_from, master_value, save_to, state, step

WAY = "fully_reshardable"
# The router has six rows, which four ranks do not divide; norms have nineteen weights, which two do not.
ODD = {"num_moe_experts": 6, "kv_lora_rank": 19, "num_layers": 1, "moe_layer_freq": 1}
JOB: dict[str, Any] = {"ep": 2, "overrides": ODD}


def life(
    folder: str, sharding_size: int | None, ep: int = 2, num_experts: int = 6, **switches: Any
) -> dict[str, Any]:
    """Take steps with both, and save and load: DDP to FSDP2, FSDP2 to DDP, and FSDP2 to a new FSDP2 job."""
    start({"use_torch_fsdp2": True, "fsdp2_sharding_size": sharding_size, **switches}, ep=ep)
    job = _job(ep, switches)
    job["overrides"]["num_moe_experts"] = num_experts
    ddp, sharded = assemble(**job), assemble(**job, fsdp2=True)
    records = [(step(ddp, 0), step(sharded, 0))]
    from_ddp, from_fsdp2 = (_made(Path(folder, name)) for name in ("ddp", "fsdp2"))
    save_to(ddp, PLAIN, from_ddp)
    step(sharded, 7)  # makes all state differ before it is loaded
    load_from(sharded, PLAIN, from_ddp)
    unequal = {"ddp to fsdp2": differing(ddp, sharded)}
    records.append((step(ddp, 1), step(sharded, 1)))
    save_to(sharded, PLAIN, from_fsdp2)
    step(ddp, 7)
    load_from(ddp, PLAIN, from_fsdp2)
    unequal["fsdp2 to ddp"] = differing(ddp, sharded)
    resumed = assemble(**job, fsdp2=True)
    load_from(resumed, PLAIN, from_fsdp2)
    # A third step shows that the optimizer's state was loaded, too.
    unequal["resumed"] = [] if step(resumed, 2) == step(sharded, 2) else ["record"]
    unequal["resumed"] += differing(resumed, sharded)
    whole, pieces = zip(*pairs(ddp, sharded), strict=True)
    experts = [parameter for name, parameter in sharded.model.named_parameters() if ".experts." in name]
    # Sharded parameters other than experts.
    dense = [
        piece
        for piece in pieces
        if isinstance(piece, DTensor) and not any(piece is expert for expert in experts)
    ]
    return {
        "records": records,
        "unequal": unequal,
        "contents": [_contents(folder) for folder in (from_ddp, from_fsdp2)],
        # This rank's share of the sharded elements, expected to be one over the number of shards.
        "share": sum(weight._local_tensor.numel() for weight in dense)
        / sum(weight.numel() for weight in dense),
        "dims": {weight.placements[-1].dim for weight in dense},
        "experts": {_cut(expert) for expert in experts},
        "bytes of experts": sum(local_of(expert).nbytes for expert in experts)
        / sum(expert.nbytes for expert in experts),
        "whole": sum(not isinstance(piece, DTensor) for piece in pieces),
        "of": len(whole),
        "units": [
            type(module).__name__ for module in sharded.model.modules() if isinstance(module, FSDPModule)
        ],
    }


def _cut(parameter: Any) -> tuple[int, int]:
    """Return the sharded dimension and the number of shards, ``(-1, 1)`` for an unsharded parameter."""
    from mindspeed_dsa.parallel.local_shards import cut_of

    if not isinstance(parameter, DTensor):
        return (-1, 1)
    cut = cut_of(parameter)
    return cut.dim, cut.pieces


def _job(ep: int, switches: Mapping[str, Any]) -> dict[str, Any]:
    grouped = bool(switches.get("moe_grouped_gemm"))
    return {"ep": ep, "overrides": {**ODD, "moe_grouped_gemm": grouped}}


def idle_experts(**switches: Any) -> dict[str, Any]:
    """Take two steps with both; in the first, all tokens go to the same two experts. EP2 on four ranks."""
    start({"use_torch_fsdp2": True, **switches}, ep=2)
    job = _job(2, switches)
    both = assemble(**job, clip=0.1), assemble(**job, clip=0.1, fsdp2=True)
    for variant in both:
        for name, parameter in variant.model.named_parameters():
            if "router.weight" in name:
                # Equal logits send every token to the first two experts.
                local_of(parameter.detach()).zero_()
        variant.optimizer.reload_model_params()  # master weights are copies of the router weights
    first = [step(variant, 0) for variant in both]
    _, experts = both[1].parts
    # Zero moments show experts without tokens.
    moments = [
        local_of(state["exp_avg"]).count_nonzero().item() for state in experts.optimizer.state.values()
    ]
    return {"records": [first, [step(variant, 1) for variant in both]], "moments": moments}


def late_gradients() -> str:
    """Return the error of a first step in which FSDP2 reduces no gradients after a unit's backward."""
    start({"use_torch_fsdp2": True}, ep=2)
    sharded = assemble(**JOB, fsdp2=True)
    # Without this hook, FSDP2 reduces no gradients in backward.
    with mock.patch.object(FSDPParamGroup, "post_backward"):
        try:
            step(sharded, 0)
        except SettingsError as error:
            return str(error)
    return "nothing"


def undefined_gradients() -> str:
    """Return the error of a step with a weight that is NaN on rank 1."""
    start({"use_torch_fsdp2": True}, ep=2)
    context = running(FEATURE.name)
    assert context is not None
    context.state(CheckedGradients).wanted = True  # as the job's arguments say
    sharded = assemble(**JOB, fsdp2=True)
    weight = next(param for param in sharded.model.parameters() if isinstance(param, DTensor))
    if torch.distributed.get_rank() == 1:
        local_of(weight.detach()).fill_(float("nan"))
    try:
        step(sharded, 0)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def exchange(folder: str, precision: str, **switches: Any) -> dict[str, Any]:
    """Load the distributed optimizer's checkpoint into FSDP2, and FSDP2's into the distributed optimizer."""
    start({"use_torch_fsdp2": True, **switches}, ep=2)
    job = {**_job(2, switches), "precision": precision}
    whole, sharded = assemble(**job, distributed=True), assemble(**job, fsdp2=True)
    for number in range(2):
        step(whole, number)
        step(sharded, 7)  # makes all state differ before it is loaded
    folders = [_made(Path(folder, name)) for name in ("first", "second", "third", "slices")]
    first, second, third, slices = folders
    save_to(whole, WAY, first)
    load_from(sharded, WAY, first)
    save_to(sharded, WAY, second)
    again = assemble(**job, distributed=True)
    load_from(again, WAY, second)
    save_to(again, WAY, third)
    # A refused load must leave the state unchanged.
    before, refused = state(sharded), ""
    # The distributed optimizer cannot save grouped experts in this format.
    if not switches.get("moe_grouped_gemm"):
        save_to(whole, "dp_reshardable", slices)
        try:
            load_from(sharded, "dp_reshardable", slices)
        except SettingsError as error:
            refused = str(error)
    assert state(sharded) == before, "nothing is touched by what is refused"
    return {
        "unequal": [_unequal(first, other) for other in (second, third)],
        "records": [step(job, 2) for job in (whole, again, sharded)],
        "states": [state(job) for job in (whole, again)],
        "steps": {float(each["step"]) for part in sharded.parts for each in part.optimizer.state.values()},
        "refused": refused,
    }


def stages(folder: str, precision: str, way: str, **switches: Any) -> dict[str, Any]:
    """Save and resume with two stages, the first without experts, and random gradients."""
    start({"use_torch_fsdp2": True, **switches}, pp=2, ep=2)
    overrides = {
        "pipeline_model_parallel_size": 2,
        "moe_grouped_gemm": bool(switches.get("moe_grouped_gemm")),
    }
    options: dict[str, Any] = {"precision": precision, "ep": 2, "fsdp2": True, "overrides": overrides}
    unbroken, resumed = (assemble(**options) for _ in range(2))
    for number in range(2):
        _step_with_drawn_gradients(unbroken, number)
    save_to(unbroken, way, folder)
    load_from(resumed, way, folder)
    norms = [_step_with_drawn_gradients(job, 2) for job in (unbroken, resumed)]
    return {
        "numbers": [
            sum(len(group["params"]) for group in part.optimizer.param_groups) for part in resumed.parts
        ],
        "norms": norms,
        "states": [state(job) for job in (unbroken, resumed)],
    }


def stages_of_ddp(folder: str) -> list[str]:
    """Load plain DDP's checkpoint of two stages into FSDP2; return the keys that differ."""
    import mindspeed_dsa

    start(pp=2, ep=2)
    options: dict[str, Any] = {"ep": 2, "overrides": {"pipeline_model_parallel_size": 2}}
    whole = assemble(**options)
    _step_with_drawn_gradients(whole, 0)
    save_to(whole, PLAIN, folder)
    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**DSA_ON, use_torch_fsdp2=True)
    sharded = assemble(**options, fsdp2=True)
    load_from(sharded, PLAIN, folder)
    unequal = differing(whole, sharded)
    _step_with_drawn_gradients(sharded, 1)
    steps = {float(each["step"]) for part in sharded.parts for each in part.optimizer.state.values()}
    # Step counts are loaded (1) and continued (2).
    return [*unequal, *([] if steps == {2} else ["steps"])]


def _step_with_drawn_gradients(job: Any, number: int) -> float:
    from mindspeed_dsa.parallel.local_shards import like

    job.model.zero_grad_buffer()
    job.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(number)
    for parameter in job.model.parameters():
        # The same seed on all ranks: replicas get equal gradients.
        drawn = torch.randn(local_of(parameter).shape, generator=generator)
        if isinstance(parameter, DTensor):
            parameter.grad = like(drawn, parameter)
        else:
            parameter.main_grad.copy_(drawn)
    return float(job.optimizer.step()[1])


def _unequal(one: str, other: str) -> list[str]:
    """Return the keys of tensors that are not bit-identical in two checkpoints."""
    from megatron.core import dist_checkpointing

    first, second = (dist_checkpointing.load_plain_tensors(folder) for folder in (one, other))
    names = sorted(key for key, value in first.items() if isinstance(value, Tensor))
    # Guards against comparing empty checkpoints.
    assert len(names) > 20
    assert {key for key, tensor in second.items() if isinstance(tensor, Tensor)} == set(names)
    return [name for name in names if not torch.equal(first[name], second[name])]


def _made(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return str(folder)


def _contents(folder: str) -> dict[str, tuple[int, ...]]:
    from megatron.core import dist_checkpointing

    return {key: each.global_shape for key, each in dist_checkpointing.load_tensors_metadata(folder).items()}


def pairs(one: Any, other: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of the parameters of two jobs with the same model."""
    yield from zip(one.model.parameters(), other.model.parameters(), strict=True)


def differing(whole: Any, sharded: Any) -> list[str]:
    """Return the names of weights, masters, moments and steps that differ from the other job's shard."""
    differences = []
    for index, (theirs, ours) in enumerate(pairs(whole, sharded)):
        differences += [f"weight {index}"] if not same(theirs, ours) else []
    for first, second in zip(whole.parts, sharded.parts, strict=True):
        mains = [
            [p for group in part.optimizer.param_groups for p in group["params"]] for part in (first, second)
        ]
        for index, (theirs, ours) in enumerate(zip(*mains, strict=True)):
            states = first.optimizer.state[theirs], second.optimizer.state[ours]
            # State on the host is stored as this rank's shard.
            pair = master_value(first, theirs), master_value(second, ours)
            differences += [f"master {index}"] if not same(*pair, ours) else []
            assert states[0].keys() == states[1].keys()
            differences += [
                f"{key} {index}" for key in states[0] if not same(states[0][key], states[1][key], ours)
            ]
    return differences


def same(whole: Tensor, piece: Tensor, parameter: Tensor | None = None) -> bool:
    """Whether ``piece`` equals this rank's shard of ``whole``, sharded as ``parameter`` is."""
    return torch.equal(local_of(piece), _piece(whole, piece if parameter is None else parameter))


def _piece(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of a tensor with a parameter's shape."""
    theirs = local_of(whole)
    if isinstance(parameter, DTensor) and theirs.shape == parameter.shape:
        from mindspeed_dsa.parallel.local_shards import cut_of

        cut = cut_of(parameter)
        theirs = theirs.chunk(cut.pieces, cut.dim)[cut.index]
    return theirs


def refusal(**switches: Any) -> str:
    """Return the error of building the wrapper, or an empty string."""
    start({"use_torch_fsdp2": True, **switches})
    try:
        assemble(fsdp2=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def indexers_alone(stage: str, **switches: Any) -> dict[str, Any]:
    """Take two steps with both, with layers frozen except for their indexers.

    Args:
        stage: DSA stage. The warm-up freezes all layers; otherwise the embedding and the first layer are
            frozen.
        **switches: further feature switches.
    """
    start({"use_torch_fsdp2": True, "dsa_stage": stage, **switches})

    def model(*args: Any, **kwargs: Any) -> Any:
        built = gpt_model(*args, **kwargs)
        if stage != "warmup":
            for part in (built.embedding, built.decoder.layers[0]):
                for name, parameter in part.named_parameters():
                    parameter.requires_grad_(".indexer." in name)
        return built

    with mock.patch("tests.support.optimizer_job.gpt_model", model):
        both = assemble(precision="fp32"), assemble(precision="fp32", fsdp2=True)
    # Copies, because the optimizer updates the parameters in place.
    before = [parameter.detach().clone() for parameter in both[0].model.parameters()]
    records = [[step(variant, number) for variant in both] for number in range(2)]
    changed = [
        name
        for (name, parameter), first in zip(both[0].model.named_parameters(), before, strict=True)
        if not torch.equal(parameter, first)
    ]
    unequal = [
        name
        for (name, theirs), ours in zip(
            both[0].model.named_parameters(), both[1].model.parameters(), strict=True
        )
        if not torch.allclose(local_of(ours), _piece(theirs, ours), rtol=1e-4, atol=1e-6)
    ]
    return {"records": records, "changed": changed, "unequal": unequal}
