"""The one-liner: ``import mindspeed_dsa.megatron_adaptor`` at the top of a training script.

Reads environment and command line, and arms the patches of every feature they switch on, before or
after Megatron is imported. With nothing switched on it changes nothing.
"""

import sys

from mindspeed_dsa import session

session.enable_from_argv(sys.argv[1:])
