"""Megatron-LM's pretrain_gpt.py, with the first batches of each rank written to a file.

    python run_megatron.py recorded_pretrain.py ARGUMENTS OF pretrain_gpt.py...

``MEGATRON_LM`` names the checkout, and ``BATCHES`` the folder of the files ``rank0.pt``, ``rank1.pt`` ...
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the script, and write each rank's ``tokens`` and ``labels`` ``[samples, length]``."""
    checkout = Path(os.environ["MEGATRON_LM"])
    sys.argv[0] = str(checkout / "pretrain_gpt.py")
    sys.path.insert(0, str(checkout))

    import torch
    from megatron.core.models.gpt import GPTModel

    forward, calls = GPTModel.forward, list[dict[str, Any]]()

    def recorded(
        self: Any, input_ids: Any, position_ids: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.training:
            calls.append({"tokens": input_ids, "labels": kwargs.get("labels")})
            torch.save(calls, Path(os.environ["BATCHES"], f"rank{os.environ['RANK']}.pt"))
        return forward(self, input_ids, position_ids, attention_mask, *args, **kwargs)

    GPTModel.forward = recorded
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
