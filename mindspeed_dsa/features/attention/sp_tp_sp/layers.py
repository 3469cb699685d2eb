"""MLA projections that run on a rank's sequence shard with full weights.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.attention.sp_tp_sp.pieces import project_as_they_arrive
from mindspeed_dsa.megatron.local_modules import DuplicatedLinear
from mindspeed_dsa.megatron.mla_projections import Projections
from mindspeed_dsa.parallel.names import named
from mindspeed_dsa.patches.errors import SettingsError

_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")


class WholeLinear(DuplicatedLinear):
    """Replicated projection that replaces a tensor parallel one.

    Distributed checkpoints are compatible, because they store a tensor parallel weight as one tensor.
    """

    def get_extra_state(self) -> None:
        """Return None: nothing to save. Megatron's parallel layers define this method too."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the state."""


class OutputProjection(WholeLinear):
    """Output projection with the full weight, after an exchange of heads for tokens.

    Attributes:
        group: tensor parallel group, set after the layer is built.
    """

    group: ProcessGroup

    def forward(self, heads: Tensor) -> tuple[Tensor, Tensor | None]:
        """Project this rank's heads ``[s, b, heads / t * dim]`` to ``[s / t, b, hidden]``; return it and the
        bias.
        """
        with named("output of attention"):
            output = project_as_they_arrive(heads, self.weight, self.group)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


@cache
def _of_megatron(kind: Any, megatron: Megatron) -> Any:
    """Bind the class to a Megatron accessor; cached."""
    return type(kind.__name__, (kind,), {"megatron": megatron, "__module__": __name__})


def project_own_rows(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``MLASelfAttention.__init__`` to replace down and output projections by replicated ones.

    The up-projections stay split by head, and all-gather the latents over the sequence.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config, group = self.config, Projections(self, context.megatron).tensor_parallel_group()
        if group.size() == 1 or not config.sequence_parallel:
            raise SettingsError(
                f"{context.feature}: a layer was built for {group.size()} tensor parallel ranks "
                f"{'with' if config.sequence_parallel else 'without'} sequence parallelism; it "
                "takes at least two ranks, and sequence_parallel=True"
            )
        split = context.megatron("core.tensor_parallel.layers").ColumnParallelLinear
        for name in _DOWN:
            layer = getattr(self, name, None)
            # Down projections that are replicated already run on the rank's own tokens.
            if isinstance(layer, split):
                setattr(self, name, _whole(WholeLinear, layer, config, config.init_method, context))
        init = config.output_layer_init_method
        self.linear_proj = _whole(OutputProjection, self.linear_proj, config, init, context)
        self.linear_proj.group = group

    return __init__


def _whole(kind: Any, layer: Any, config: Any, init: Any, context: Context[None]) -> Any:
    """Build a replicated layer that replaces a tensor parallel one."""
    return _of_megatron(kind, context.megatron)(
        layer.input_size,
        layer.output_size,
        config=config,
        init_method=init,
        bias=layer.bias is not None,
        skip_bias_add=layer.skip_bias_add,
    )
