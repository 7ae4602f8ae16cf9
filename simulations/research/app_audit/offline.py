"""Takes the network away from a process of the audit."""

import socket
from typing import Any, NoReturn

__all__ = ["disconnect"]


def disconnect() -> list[str]:
    """Refuse connections from now on; return a list that gets what is asked for."""
    asked: list[str] = []

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        place = next((a for a in args if isinstance(a, str | tuple)), "")
        asked.append(str(place[0] if isinstance(place, tuple) else place))
        raise OSError("`flwr-privacy audit` runs an app without a network")

    socket.socket.connect = refused  # type: ignore[method-assign]
    socket.socket.connect_ex = refused  # type: ignore[method-assign]
    socket.getaddrinfo = refused
    return asked
