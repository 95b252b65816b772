"""Variables that ranks get without fnaccel's launcher, and variables that ranks on other hosts need."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fnaccel.launch import tpu
from fnaccel.launch.job import Job
from fnaccel.launch.presets import DEBUG, nccl_variables
from fnaccel.world import flags

_CARRIED = re.compile(
    "(CCL|CUDA|FI|GLOO|HF|HSA|KMP|MIOPEN|MKL|NCCL|OMP|PYTORCH|TORCH|TOKENIZERS|UCX|WANDB|XLA|ZE)_[A-Z0-9_]+"
    "|PYTHON[A-Z]+|LD_LIBRARY_PATH"
)
_OF_THIS_MACHINE = re.compile(
    r"CUDA_VISIBLE_DEVICES|.*(TOKEN|KEY|SECRET|PASSWORD)(_.*)?|TORCHELASTIC_.*|NCCL_SOCKET_IFNAME|GLOO_SOCKET_IFNAME"
)


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of this process that ranks on other hosts get too: those of PyTorch and of its libraries.

    Names of interfaces and of GPUs differ from host to host. A token or a key would be part of a command
    line, and all users of a host can read command lines.

    Example:
        >>> carried({"NCCL_DEBUG": "WARN", "HF_TOKEN": "x", "HOME": "y"})
        {'NCCL_DEBUG': 'WARN'}
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if _CARRIED.fullmatch(name) and not _OF_THIS_MACHINE.fullmatch(name)
    }


def of_all_ranks(job: Job) -> dict[str, str]:
    """The variables that are equal on all ranks of a job that another launcher starts.

    Example:
        >>> of_all_ranks(Job(script="t.py", cpu=True, threads=2, env={"A": "1"}))
        {'A': '1', 'FNACCEL_DEVICE': 'cpu', 'OMP_NUM_THREADS': '2'}
    """
    variables = job.visible | flags.pack(job.overrides)
    if job.watchdog != Job().watchdog:
        variables["FNACCEL_WATCHDOG"] = f"{job.watchdog:g}"
    if job.cpu:
        variables["FNACCEL_DEVICE"] = "cpu"
    if job.tpu:
        variables |= tpu.variables({})
    if job.threads is not None:
        variables["OMP_NUM_THREADS"] = str(job.threads)
    if job.role is not None:
        variables["ROLE_NAME"] = job.role
    if job.debug:
        variables |= DEBUG
    return variables | nccl_variables(job.nccl, cards=())
