"""Train a small DeepSeek-V3.2-shaped model on real text with stock megatron-core and mindspeed_dsa.

python examples/pretrain_dsa.py
torchrun --nproc-per-node 4 examples/pretrain_dsa.py --pipeline-model-parallel-size 2
"""

import mindspeed_dsa.megatron_adaptor  # noqa: F401 - the one line that arms the library

# isort: split
import sys

from dsa_job.app import main

if __name__ == "__main__":
    sys.exit(main())
