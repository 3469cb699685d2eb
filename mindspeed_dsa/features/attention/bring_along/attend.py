"""From projected operands to the attention's output with its indexer loss attached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.features.attention.dsa_module import dsa_module
from mindspeed_dsa.features.attention.fused import options
from mindspeed_dsa.features.attention.fused.attend import Operands, attend_densely, attend_sparsely
from mindspeed_dsa.features.attention.fused.indexer import Selection, index_inputs
from mindspeed_dsa.features.attention.fused.loss import dense_loss, sparse_loss
from mindspeed_dsa.features.attention.loss_gate_impl import coefficient, with_zero_gradients
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer


def attend(attention: Any, operands: Operands, x: Tensor, qr: Tensor) -> Tensor:
    """Choose keys, attend to them, and attach the indexer loss where it is wanted.

    Args:
        attention: our ``DSAttention``.
        operands: of the main attention, by head or absorbed.
        x: ``[sequence, batch, hidden]``, a rank's part of the sequence under sequence parallelism; detached.
        qr: ``[sequence, batch, q_lora_rank]``, likewise.

    Returns:
        ``[sequence, batch, heads * value_dim]``.
    """
    backend = options.current().backend
    trains = attention.training and torch.is_grad_enabled()
    wants_loss = trains and coefficient(attention.config) > 0
    indexer, length = attention.indexer, operands.query.shape[0]

    if length <= indexer.index_topk:
        # Every visible key is chosen: dense attention, and both forms of the loss are the dense one.
        out = attend_densely(operands, backend).out
        if wants_loss:
            loss = dense_loss(attention, operands, index_inputs(indexer, x, qr), backend)
    else:
        with torch.set_grad_enabled(wants_loss):
            inputs = index_inputs(indexer, x, qr)
            selection = Selection(
                *lightning_indexer(
                    inputs.query, inputs.key, inputs.weights, indexer.index_topk, backend=backend
                ),
                inputs,
            )
        on_chosen_keys = wants_loss and attention.config.dsa_indexer_use_sparse_loss
        attended = attend_sparsely(operands, selection.topk_indices, backend, with_sum=on_chosen_keys)
        out = attended.out
        if on_chosen_keys:
            loss = sparse_loss(attention, operands, selection, attended, backend)
        elif wants_loss:
            loss = dense_loss(attention, operands, inputs, backend)

    if wants_loss:
        return _attach(attention, out, loss)
    return with_zero_gradients(out, indexer) if trains else out


def _attach(attention: Any, out: Tensor, loss: Tensor) -> Tensor:
    dsa = dsa_module()
    dsa.DSAIndexerLossLoggingHelper.save_loss_to_tracker(
        loss=loss, layer_number=attention.layer_number, num_layers=attention.config.num_layers
    )
    attached: Tensor = dsa.DSAIndexerLossAutoScaler.apply(out, loss)
    return attached
