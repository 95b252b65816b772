"""How many accelerators there are, asked without leaving a mark on the process that asks."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from fnaccel.errors import LaunchError
from fnaccel.launch.job import Job


def count_processes(job: Job, *, where: str) -> int:
    """The number of ranks on this machine.

    Args:
        job: `ranks` is the number that was asked for. None: one for each accelerator, or 1.
        where: the function or option that an error names.

    Raises:
        LaunchError: more ranks than accelerators, or no GPU is among those that the job names.
    """
    accelerators = 0 if job.cpu or job.tpu else count_accelerators(job.visible)
    if job.gpus is not None and not (job.cpu or job.tpu or accelerators):
        raise LaunchError(
            f"no GPU of this machine is among {job.gpus}",
            where=where,
            fix="numbers from `nvidia-smi -L`, or leave it out",
        )
    if job.ranks is None:
        return max(1, accelerators)
    if 0 < accelerators < job.ranks:
        raise LaunchError(
            f"{job.ranks} processes need an accelerator each, and there are {accelerators}",
            where=where,
            fix=f"{accelerators} processes, or compute on the CPU",
        )
    return job.ranks


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
