"""Ports and interfaces: the port of the ranks' store, and this machine's interface to reach it."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Generator

from fnaccel.errors import LaunchError

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface


def free_port() -> int:
    """A TCP port that nothing listens on at this moment.

    Example:
        >>> free_port() > 1023
        True
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def reserved_port() -> Generator[int]:
    """A free TCP port. In the body no process gets it by asking for a free one, and a rank can listen on it.

    Linux lets a second socket bind to the port of one that does not listen. Other systems reserve nothing.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


def check_port(port: int) -> None:
    """See that rank 0 will be able to listen on a port.

    Raises:
        LaunchError: something else does, or this user may not.
    """
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise LaunchError(
            f"port {port} can't be listened on: {error.strerror}",
            where="fnaccel launch --master-port",
            fix="name another port, the same on every machine. On one machine leave it out",
        ) from error


def wait_for_port(port: int, limit: float = 10.0) -> None:
    """Wait until a port can be listened on again: a child of a killed process may hold it.

    Args:
        port: the port.
        limit: seconds. After that, the process that needs the port raises.
    """
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            check_port(port)
        except LaunchError:
            time.sleep(0.1)
        else:
            return


def interface_to(address: str) -> str | None:
    """The name of the interface by which this machine reaches another one, or itself by that address.

    Gloo binds to the address of the host name. It is often 127.0.0.1, and no other machine can reach
    that. The fix is to name the interface in GLOO_SOCKET_IFNAME.

    Args:
        address: a host name or IPv4 address.

    Returns:
        The name, such as `"eth0"`, or None if it can't be determined.
    """
    if sys.platform != "linux":
        return None
    local_address = address_to(address)
    names = [name for _, name in socket.if_nameindex()] if local_address is not None else []
    return next((name for name in names if _address_of(name) == local_address), None)


def address_to(address: str) -> str | None:
    """This machine's own address on the way to another one, or None if there is no way.

    Example:
        >>> address_to("127.0.0.1")
        '127.0.0.1'
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it asks the kernel for the route
            return probe.getsockname()[0]
    except OSError:
        return None


def _address_of(interface: str) -> str | None:
    import fcntl  # noqa: PLC0415 - not on every platform

    request = struct.pack("256s", interface.encode()[:15])
    with (
        contextlib.suppress(OSError),  # an interface without an IPv4 address
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None
