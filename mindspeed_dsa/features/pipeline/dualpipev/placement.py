"""V-shaped placement of stages: which stage each chunk is, and which rank has the last stage.

With ``PP`` ranks, chunk 0 of rank ``r`` is stage ``r``, and chunk 1 is stage ``2 PP - 1 - r``. So the first
rank has both the embedding and the loss. Megatron's modules read their layers from the pipeline layout, and
call functions such as ``is_pipeline_last_stage`` to find the model's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.pipeline.dualpipev.feature import (
    CHUNKS,
    FLAG,
    Options,
    check_dualpipev,
    even_layout,
)
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.patches.errors import SettingsError


def lay_out(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Wrap ``TransformerConfig.__post_init__``: set a V-shaped layout for pipeline parallel models."""
    layout_class = cache(partial(_v_shaped, context.megatron))

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.pipeline_model_parallel_size > 1:
            require(context, check_dualpipev, self)
            self.pipeline_model_parallel_layout = even_layout(self) or self.pipeline_model_parallel_layout
            self.virtual_pipeline_model_parallel_size = CHUNKS
        original(self, *args, **kwargs)
        if self.pipeline_model_parallel_size > 1:
            plain = self.pipeline_model_parallel_layout
            if not getattr(plain, "v_shaped", False):
                self.pipeline_model_parallel_layout = layout_class()(plain)

    return __post_init__


def _v_shaped(megatron: Megatron) -> Any:
    """Build the V-shaped subclass of this Megatron's layout class."""
    parent: Any = megatron("core.transformer.pipeline_parallel_layer_layout").PipelineParallelLayerLayout
    state = megatron("core.parallel_state")

    class VShapedLayout(parent):
        """Megatron's pipeline layout with chunk 1 on the ranks in reverse order.

        Args:
            plain: layout with the same stages in Megatron's interleaved order.
        """

        v_shaped = True

        def __init__(self, plain: Any) -> None:
            self.__dict__.update(vars(plain))
            # plain.layout is [rank][turn]. 2 ranks: [[s0, s2], [s1, s3]] -> s0, s1, s2, s3.
            self.stages = [list(stage) for turn in zip(*plain.layout, strict=True) for stage in turn]
            ranks = self.pipeline_model_parallel_size
            if len(self.stages) != CHUNKS * ranks:
                raise SettingsError(
                    f"{FLAG} needs {CHUNKS * ranks} chunks on {ranks} pipeline ranks, not {len(self.stages)}"
                )
            # [rank][chunk], for other code that reads it. 2 ranks: stages [[0, 3], [1, 2]].
            self.layout = [[self.stages[rank], self.stages[-1 - rank]] for rank in range(ranks)]

        def get_layer_offset(
            self, layer_type: Any = None, vp_stage: int | None = None, pp_rank: int | None = None
        ) -> int:
            """Return the number of ``layer_type`` layers (default: decoder) in the model before a chunk."""
            if vp_stage is None:
                raise SettingsError(f"{FLAG}: a model was built without saying which of its chunks it is")
            kind = megatron("core.transformer.enums").LayerType.decoder if layer_type is None else layer_type
            rank = state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
            stage = len(self.stages) - 1 - rank if vp_stage else rank
            return sum(layers.count(kind) for layers in self.stages[:stage])

        def validate_layer_layout(self, num_layers: int, mtp_num_layers: int) -> bool:
            """Check the layout. Returns whether a stage has only MTP layers, which is never so here."""
            super().validate_layer_layout(num_layers, mtp_num_layers)
            return False

    return VShapedLayout


def ends_on_first_rank(original: Callable[..., bool], context: Context[Options]) -> Callable[..., bool]:
    """Wrap ``is_pipeline_last_stage``: for a given chunk, the last stage is chunk 1 of rank 0."""

    def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        state = context.megatron("core.parallel_state")
        chunked = state.get_virtual_pipeline_model_parallel_world_size() is not None
        # Without a chunk the caller asks for the rank that reports a step. That remains the last rank, to
        # which the first one sends the losses.
        if ignore_virtual or not chunked:
            return original(ignore_virtual, vp_stage)
        return bool(vp_stage == CHUNKS - 1 and state.get_pipeline_model_parallel_rank() == 0)

    return is_pipeline_last_stage


class Reporting:
    """Flag that decides between the two meanings of ``is_pp_last_stage``.

    Args:
        context: the feature's context.

    Attributes:
        asked: True if callers look for the rank that reports the losses (the last), False if they look for
            the rank with the last stage (the first).
    """

    def __init__(self, context: Context[Options]) -> None:
        self.asked = False

    @contextmanager
    def being(self, asked: bool) -> Iterator[None]:
        """Context that sets ``asked``."""
        before, self.asked = self.asked, asked
        try:
            yield
        finally:
            self.asked = before


def last_is_first(original: Callable[..., bool], context: Context[Options]) -> Callable[..., bool]:
    """Wrap ``is_pp_last_stage``, used together with ``is_vp_last_stage``: the last stage is on rank 0."""
    reporting = context.state(Reporting)

    def is_pp_last_stage(pp_group: Any) -> bool:
        # Since 0.19 a step and an evaluation ask for the rank that reports the losses, still the last one.
        if reporting.asked:
            return original(pp_group)
        return bool(context.megatron("core.pipeline_parallel.utils").is_pp_first_stage(pp_group))

    return is_pp_last_stage


def report_on_last_rank(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``train_step`` and ``evaluate``, inside which the last rank still reports the losses."""
    reporting = context.state(Reporting)

    def run(*args: Any, **kwargs: Any) -> Any:
        with reporting.being(True):
            return original(*args, **kwargs)

    return run


def hand_out_whole_batches(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``get_batch_on_this_tp_rank`` up to 0.17 to return all tensors of the batch on every rank.

    Megatron only returns the tensors that the rank's position in the pipeline needs. In DualPipeV, the first
    rank also has the last stage.
    """

    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> Any:
        job = context.megatron("training.global_vars").get_args()
        # Without a pipeline every rank gets the complete batch.
        ranks, job.pipeline_model_parallel_size = job.pipeline_model_parallel_size, 1
        try:
            return original(*args, **kwargs)
        finally:
            job.pipeline_model_parallel_size = ranks

    return get_batch_on_this_tp_rank


def hand_out_as_one_stage(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_batch_on_this_tp_rank`` since 0.18; like :func:`hand_out_whole_batches`."""

    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> Any:
        # The only stage of a pipeline gets the complete batch.
        return original(*args, **{**kwargs, "pipeline_model_parallel_size": 1})

    return get_batch_on_this_tp_rank
