"""A side of ``try`` without torch, for tests: the environment sets its losses and its end."""

import json
import os
import sys

print(json.dumps({"device": "none", "parameters": 1_000_000}), flush=True)
fused = sys.argv[1] == "fused"
for number, _ in enumerate(sys.stdin):
    if fused and os.environ.get("FAKE_SIDE_DIES") == str(number):
        sys.exit("the fused side has died")
    loss = 4.0 - number + fused * float(os.environ.get("FAKE_SIDE_GAP", "0"))
    record = {"lm_loss": loss, "step_time_s": 0.25 if fused else 1.0, "peak_memory_bytes": 2**20 << 4 - fused}
    print(json.dumps(record), flush=True)
