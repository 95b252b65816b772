"""How many accelerators there are, asked without leaving a mark on the process that asks."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from fnaccel.errors import LaunchError


def count_accelerators(environ: Mapping[str, str] | None = None) -> int:
    """The number of accelerators that this machine shows to PyTorch.

    Args:
        environ: variables that are set before the driver is asked, such as CUDA_VISIBLE_DEVICES.

    A driver that was initialised does not survive a fork, and the ranks are forks of the caller.
    So a fork that ends at once asks the driver.

    Raises:
        LaunchError: no process can be started.
    """
    if torch.accelerator.current_accelerator() is None:  # by PyTorch's build, without the driver
        return 0
    read, write = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(read)
        os.close(write)
        raise LaunchError(
            f"no process can be started: {error.strerror}",
            where="fnaccel launch",
            fix="raise the limit of processes (ulimit -u), or end some",
        ) from error
    if pid == 0:
        try:
            os.environ.update(environ or {})
            here = torch.accelerator.is_available()
            os.write(write, str(torch.accelerator.device_count() if here else 0).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        output = answer.read()
    os.waitpid(pid, 0)
    return int(output or 0)
