"""Changes a process whose environment or command says so: Python imports this when it starts."""

import os
import sys

if ahead := os.environ.get("CLOCK_AHEAD"):
    from clock import set_clock

    set_clock(float(ahead))

if "HOSTILE_MARKS" in os.environ and "--node-config" in sys.orig_argv:
    from hostile_supernode import KINDS

    config = sys.orig_argv[sys.orig_argv.index("--node-config") + 1]
    for kind, misbehave in KINDS.items():
        if f'hostile="{kind}"' in config:
            misbehave()
