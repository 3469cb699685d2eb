"""The indexer loss's own scale, in releases of Megatron-core without DSA."""

from __future__ import annotations

import torch

from mindspeed_dsa.features.dsa.indexer_loss import LossScale
from tests.support.cuda_graphs import Graph, capture


def test_a_graph_reads_the_scale_of_each_step():
    loss_scale, graph, loss = LossScale(), Graph(), torch.tensor(3.0)
    loss_scale.set_loss_scale(torch.tensor(1.0))
    with capture(graph):
        scaled = loss * loss_scale.main_loss_backward_scale
    given = torch.tensor(0.5)
    loss_scale.set_loss_scale(given)
    given.fill_(7.0)  # a scale of the schedule that it uses for something else
    graph.replay()
    assert scaled.item() == 1.5
