"""Measured job: a few of DeepSeek's layers in fp32, stock or with features that save host time.

``python -m benchmarks.small_operators.job SIZES SWITCHES DEVICE``; see ``benchmarks/memory/child.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory.child import serve, timed
from benchmarks.model import ModelSizes, latent_layers
from benchmarks.small_operators.launches import is_launch
from mindspeed_dsa import platforms

EAGER_OPERATORS = "SMALL_OPERATORS_EAGER"
"""Environment variable that makes Inductor's wrapper call eager operators, as on a device without Triton."""
_FEW = 16
"""Tokens whose arithmetic takes next to no time: a layer's cost is then the host's."""


@dataclass(frozen=True)
class Sizes(ModelSizes):
    """Sizes of a model with experts."""

    experts: int


SMALL = Sizes(layers=4, hidden=256, heads=8, vocabulary=512, length=32, sequences=2, experts=8)


class Job:
    """Model and its measurements."""

    def __init__(self, sizes: Sizes, switches: Mapping[str, Any]) -> None:
        import mindspeed_dsa

        self.sizes = sizes
        if os.environ.get(EAGER_OPERATORS):
            from torch._inductor import config

            config.fallback_by_default = True
        mindspeed_dsa.enable(experimental_attention_variant="dsa", **switches)
        from megatron.core import parallel_state, tensor_parallel

        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(platforms.current().backend, store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(1234)
        self.model = _model(sizes)
        self._number = 0

    def step(self, sequences: int | None = None) -> dict[str, float]:
        """Run forward and backward of a microbatch; return its loss."""
        self.model.zero_grad()
        shape = (sequences or self.sizes.sequences, self.sizes.length + 1)
        tokens = torch.randint(
            self.sizes.vocabulary, shape, generator=torch.Generator().manual_seed(self._number)
        )
        self._number += 1
        loss = self.model(
            tokens[:, :-1], torch.arange(shape[1] - 1).expand(shape[0], -1), None, labels=tokens[:, 1:]
        ).mean()
        loss.backward()
        return {"loss": float(loss)}

    def short_step(self) -> dict[str, float]:
        """Run the last microbatch of an epoch, which has fewer sequences than the others."""
        return self.step(1)

    def few(self) -> None:
        """Run forward and backward of the layers only, on a few tokens."""
        hidden = torch.randn(_FEW, 1, self.sizes.hidden, generator=torch.Generator().manual_seed(0))
        output = self.model.decoder(hidden.requires_grad_(), attention_mask=None)
        output.backward(output.detach())

    def host(self) -> dict[str, float]:
        """Return microseconds of processor time of a layer's forward and backward."""
        times = []
        for _ in range(5):
            started = time.process_time()
            self.few()
            times.append(time.process_time() - started)
        return {"microseconds": 1e6 * min(times) / self.sizes.layers}

    def dispatches(self) -> dict[str, float]:
        """Return the number of operators and compiled kernels that a layer runs, in forward and backward."""
        with torch.autograd.profiler.profile() as profile:
            self.few()
        return {"dispatches": sum(map(is_launch, profile.function_events)) / self.sizes.layers}

    def saved(self) -> dict[str, float]:
        """Return bytes kept for backward by a forward, each storage once, without parameters."""
        bytes_by_storage: dict[int, int] = {}
        parameters = {each.untyped_storage().data_ptr() for each in self.model.parameters()}

        def pack(kept: Tensor) -> Tensor:
            storage = kept.untyped_storage()
            if storage.data_ptr() not in parameters:
                bytes_by_storage[storage.data_ptr()] = storage.nbytes()
            return kept

        hidden = torch.randn(self.sizes.length, self.sizes.sequences, self.sizes.hidden, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            output = self.model.decoder(hidden, attention_mask=None)
        del output
        return {"bytes": sum(bytes_by_storage.values())}

    def compiled(self) -> dict[str, Any]:
        """Return the compiler's counts so far."""
        from torch._dynamo.utils import counters

        from mindspeed_dsa import session

        running = session.current()
        context = running.contexts.get("compile-regions") if running else None
        if context is None:
            return {"regions": {}, "graph_breaks": 0, "seconds": 0.0, "failed": []}

        from mindspeed_dsa.features.compilation.regions.region import regions_of

        regions = regions_of(context).all()
        return {
            "regions": {region.name: region.compilations for region in regions},
            "graph_breaks": sum(counters["graph_break"].values()),
            "seconds": sum(region.seconds for region in regions),
            "failed": [f"{region.name}: {region.failure}" for region in regions if region.failure],
        }


def _model(sizes: Sizes) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec,
    )
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    wide, heads = sizes.hidden, sizes.heads
    config = MLATransformerConfig(
        **latent_layers(
            num_layers=sizes.layers,
            hidden_size=wide,
            num_attention_heads=heads,
            ffn_hidden_size=2 * wide,
            q_lora_rank=wide // 2,
            kv_lora_rank=wide // 4,
            qk_head_dim=wide // heads,
            qk_pos_emb_head_dim=16,
            v_head_dim=wide // heads,
            num_moe_experts=sizes.experts,
            moe_ffn_hidden_size=wide // 2,
            moe_router_topk=2,
            moe_shared_expert_intermediate_size=wide // 2,
            moe_router_load_balancing_type="seq_aux_loss",
            moe_aux_loss_coeff=1e-3,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_dtype="fp32",
            moe_token_dispatcher_type="alltoall",
            transformer_impl="local",
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
            experimental_attention_variant="dsa",
            dsa_indexer_n_heads=heads,
            dsa_indexer_head_dim=32,
            dsa_indexer_topk=64,
            dsa_indexer_loss_coeff=1e-2,
            dsa_indexer_use_sparse_loss=True,
        )
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_transformer_block_with_experimental_attention_variant_spec(config),
        vocab_size=sizes.vocabulary,
        max_sequence_length=sizes.length,
        position_embedding_type="rope",
    )


COMMANDS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "step": lambda job: timed(job.step),
    "short step": lambda job: timed(job.short_step),
    "few": lambda job: {"none": job.few()},
    "host": lambda job: job.host(),
    "dispatches": lambda job: job.dispatches(),
    "saved": lambda job: job.saved(),
    "compiled": lambda job: job.compiled(),
}


def main(sizes: str, switches: str, device: str) -> None:
    """Serve commands until stdin ends."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    serve(Job(Sizes(**json.loads(sizes)), {**json.loads(switches), "mindspeed_platform": device}), COMMANDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
