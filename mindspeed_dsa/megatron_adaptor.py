"""The one-liner: ``import mindspeed_dsa.megatron_adaptor`` at the top of a training script.

Reads environment and command line, and arms the patches of every feature they switch on, before or
after Megatron is imported. With nothing switched on it changes nothing.
"""

import sys

from mindspeed_dsa import session
from mindspeed_dsa.patches.errors import MindSpeedDSAError, show_without_traceback
from mindspeed_dsa.settings import ACCEPT_MINDSPEED
from mindspeed_dsa.tools.migrate.accept import accept

try:
    arguments = sys.argv[1:]
    accepted = [ACCEPT_MINDSPEED.name] if accept(arguments) else []
    sys.argv[1:] = arguments
    session.enable_from_argv([*accepted, *arguments])
except MindSpeedDSAError:
    show_without_traceback()
    raise
