"""Steps of a transformers model on a device, which is the argument; prints a line of JSON."""

from __future__ import annotations

import json
import sys

import torch

from tests.hosts.transformers.models import VOCABULARY, build

MARK = "STEPS "
# Widths that the indexer takes; attention to fewer than 1024 keys is PyTorch's, in chunks.
SIZES = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "index_topk": 16,
    "num_hidden_layers": 2,
}


def main() -> None:
    """Train two steps in bf16 on the device, with our operators and the indexers' losses."""
    from mindspeed_dsa.integrations.transformers import apply_dsa
    from mindspeed_dsa.ops.backend import calls

    device = sys.argv[1]
    model = build("deepseek_v32", **SIZES).to(device, torch.bfloat16)
    in_use = apply_dsa(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randint(VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(1)).to(device)
    losses, norms = [], []
    for _ in range(2):
        output = model(input_ids=rows, labels=rows, use_cache=False)
        output.loss.backward()
        losses.append(output.loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    in_use.undo()
    found = {"losses": losses, "norms": norms, "calls": [" ".join(names) for names in calls()]}
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
