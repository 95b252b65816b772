"""`fnaccel env`: versions, devices and the variables that `fa.start` and the launcher read."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata

from fnaccel import __version__
from fnaccel.cli.options.env import parser
from fnaccel.cli.terminal import print_json

_OPTIONAL = ("accelerate", "deepspeed", "torch-xla", "torchdata", "transformers", "wandb")
_READ = (
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_", "OMP_NUM_THREADS", "FNACCEL_", "MASTER_", "RANK",
    "WORLD_SIZE", "LOCAL_", "GROUP_RANK", "OMPI_COMM_WORLD_", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
)  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Print the versions, devices and variables for a bug report.

    Args:
        arguments: after `fnaccel env`.

    Example:
        >>> run([])
        fnaccel ...
        0
    """
    if parser().parse_args(arguments).json:
        print_json(facts())
        return 0
    for name, value in facts().items():
        print(f"{name:<10} {value}")
    return 0


def facts() -> dict[str, str]:
    """The facts that `fnaccel env` prints, by name."""
    facts = {
        "fnaccel": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **_facts_of_torch(),
        "installed": ", ".join(_installed()) or "no optional package",
    }
    for name in sorted(os.environ):
        if name.startswith(_READ):
            facts[name] = os.environ[name]
    return facts


def _facts_of_torch() -> dict[str, str]:
    """Its version, the devices that it sees and its backends. Why, if it can't be imported."""
    try:
        import torch  # noqa: PLC0415 - a report is wanted most where torch does not work
        import torch.distributed as dist  # noqa: PLC0415
    except (ImportError, OSError) as error:
        return {"torch": f"can't be imported: {error}", "devices": f"{os.cpu_count()} cores"}
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    return {
        "torch": torch.__version__,
        "devices": _devices(),
        "backends": ", ".join(name for name, here in backends.items() if here) or "none",
    }


def _devices() -> str:
    import torch  # noqa: PLC0415

    parts = [f"cpu with {os.cpu_count()} cores, {torch.get_num_threads()} threads for PyTorch"]
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is not None:
        count = torch.accelerator.device_count()
        named = f" ({torch.cuda.get_device_name()})" if kind.type == "cuda" else ""
        parts.append(f"{count} x {kind.type}{named}")
    return "; ".join(parts)


def _installed() -> list[str]:
    packages: list[str] = []
    for name in _OPTIONAL:
        try:
            packages.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return packages
