"""Feature that distributes whole experts over tensor parallel ranks too (expert parallel size TP x EP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Context, Feature, Flag
from mindspeed_dsa.megatron import across_layouts
from mindspeed_dsa.megatron.configuration import argument, cuts_of_muon
from mindspeed_dsa.megatron.dsa import uses_dsa
from mindspeed_dsa.megatron.expert_parallel import number_of_experts
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.patches.spec import Patch


def extend(args: Any) -> Sequence[str]:
    """Multiply the expert parallel size by the tensor parallel size; a ``Feature.rewrite``.

    Args:
        args: job arguments, changed in place.

    Returns:
        Log messages, one per changed argument.
    """
    tp, ep, etp = layout(args)
    # etp == 1: done already, by an earlier call, by the checkpoint with these arguments, or by the user.
    if etp is not None or list(check_tp_extend_ep(args)):
        return ()
    args.expert_model_parallel_size, args.expert_tensor_parallel_size = tp * ep, 1
    text = (
        f"experts: tensor parallel {tp} x expert parallel {ep} becomes expert parallel {tp * ep} with whole "
        f"experts (--expert-tensor-parallel-size 1); attention stays tensor parallel {tp}"
    )
    return (text,)


_FLAG = "--moe-tp-extend-ep"


def check_tp_extend_ep(args: Any, options: None = None) -> Iterator[str]:
    """Yield a problem for parallel sizes that conflict with the flag or do not divide the experts.

    Accepts arguments before and after :func:`extend`. If the expert tensor parallel size is 1, they are
    already extended.
    """
    tp, ep, etp = layout(args)
    experts = number_of_experts(args)
    if not experts:
        yield f"{_FLAG}: this model has no experts; set --num-experts or omit the flag"
        return
    if etp != 1 and (muon := cuts_of_muon(args)):
        yield f"{_FLAG} keeps experts whole, and {muon}; add --muon-tp-mode duplicated, or omit one of them"
        return
    if etp not in (None, 1):
        yield (
            f"{_FLAG} gives each rank whole experts, and --expert-tensor-parallel-size {etp} slices them; "
            "omit one of them"
        )
        return
    if etp == 1 and ep % tp:
        yield (
            f"{_FLAG}: with --expert-tensor-parallel-size 1 the expert parallel size counts the tensor "
            f"parallel ranks, and --expert-model-parallel-size {ep} is no multiple of "
            f"--tensor-model-parallel-size {tp}; omit --expert-tensor-parallel-size, or set "
            f"--expert-model-parallel-size {tp * ep}"
        )
        return
    whole = ep if etp == 1 else tp * ep
    ranks = (
        f"--tensor-model-parallel-size {tp} x --expert-model-parallel-size {ep}"
        if etp is None
        else (f"--expert-model-parallel-size {ep}")
    )
    if experts % whole:
        yield f"{_FLAG}: {experts} experts cannot be spread evenly over {whole} ranks ({ranks})"
    world, pp = argument(args, "world_size"), argument(args, "pipeline_model_parallel_size") or 1
    if world and world % (whole * pp):
        yield (
            f"{_FLAG}: {world} processes cannot be split into {whole} expert parallel ranks ({ranks}) x "
            f"--pipeline-model-parallel-size {pp}; start a multiple of {whole * pp}"
        )


def layout(args: Any) -> tuple[int, int, int | None]:
    """Return the tensor, expert and expert tensor parallel size; the last is ``None`` if not given."""
    return (
        argument(args, "tensor_model_parallel_size") or 1,
        argument(args, "expert_model_parallel_size") or 1,
        argument(args, "expert_tensor_parallel_size"),
    )


def require_whole_experts(context: Context[None]) -> None:
    """Check that the process groups were built from the rewritten arguments.

    Raises:
        MindSpeedDSAError: the process groups use expert tensor parallelism.
    """
    state = context.megatron("core.parallel_state")
    if not state.model_parallel_is_initialized():
        return
    size = state.get_expert_tensor_parallel_world_size()
    if size != 1:
        raise MindSpeedDSAError(
            f"mindspeed_dsa: {context.feature}: the process groups slice experts over {size} ranks; a job "
            "without Megatron-LM's parser calls mindspeed_dsa.validate(args) before it makes groups and "
            f"configurations of its arguments, or omits {_FLAG}"
        )


FEATURE = Feature(
    name="moe-tp-extend-ep",
    summary="Gives the tensor parallel ranks whole experts: the expert parallel size becomes TP x EP, and no "
    "expert is sliced.",
    flags=(
        Flag(
            "--moe-tp-extend-ep",
            "Spread the experts over TP x EP ranks instead of slicing each over TP of them.",
        ),
    ),
    patches=across_layouts.ROWS,
    rewrite=extend,
    check=check_tp_extend_ep,
    on_finalize="mindspeed_dsa.features.moe.tp_extend_ep.feature:require_whole_experts",
    doc="moe-tp-extend-ep.md",
)

# -- copies of whole experts ---------------------------------------------------------------------


def reduce_over_copies(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Wrap ``MoELayer.__init__``: reduce expert gradients over all ranks with a copy of the expert."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        state = context.megatron("core.parallel_state")
        slices = state.get_expert_tensor_parallel_world_size()
        if slices == state.get_tensor_model_parallel_world_size():
            return
        # With an expert tensor parallel size of its own, several ranks hold a copy of each slice and see
        # other tokens. They are the expert data parallel group. Megatron reduces over it only parameters with
        # allreduce = False, and sets this mark only under expert parallelism.
        for parameter in self.experts.parameters():
            parameter.allreduce = False
        # Dispatchers move the tokens between these ranks. Without the mark, linear layers of 0.12 would move
        # them as well, over the wrong ranks.
        for module in self.experts.modules():
            if hasattr(module, "explicit_expert_comm"):
                module.explicit_expert_comm = True

    return __init__


COPIES = Feature(
    name="dsa-expert-tp-grads",
    summary="Sums the gradients of experts that tensor parallel ranks have copies of: without expert "
    "parallelism, and with an expert tensor parallel size other than the tensor parallel size.",
    flags=(EXPERIMENTAL_ATTENTION_VARIANT,),
    active=uses_dsa,
    when="the model uses DSA",
    doc="moe-tp-extend-ep.md",
    patches=(
        Patch(
            "megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
            "wrap",
            "mindspeed_dsa.features.moe.tp_extend_ep.feature:reduce_over_copies",
            "without expert parallelism, each copy of an expert gets only the gradients of its own tokens, "
            "so the copies drift apart",
            versions=">=0.12.1,<0.19",
            priority=100,  # outermost, to see the experts that other features have built
        ),
    ),
)
