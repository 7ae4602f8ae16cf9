"""Another time in a process."""

import datetime as module
import sys
import time
from typing import Any

_now, _time = module.datetime, time.time


def set_clock(ahead: float) -> None:
    """Set the clock of this process ahead by some seconds, wherever Python code looks at it."""
    by = module.timedelta(seconds=ahead)

    class Skewed(_now):
        @classmethod
        def now(cls, tz: module.tzinfo | None = None) -> "Skewed":
            return cls.fromtimestamp((_now.now(tz) + by).timestamp(), tz)

    own: Any = time
    own.time = lambda: _time() + ahead
    for place in [*sys.modules.values()]:  # also where somebody imported the class by its name
        if getattr(place, "datetime", None) is _now:
            vars(place)["datetime"] = Skewed
