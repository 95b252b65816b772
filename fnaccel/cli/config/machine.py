"""`this_machine`: the facts of this machine on which the questions and the default recipe depend."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import attrs

from fnaccel.config.questions import Machine
from fnaccel.launch.tpu import is_tpu

DEVICES = ("nvidia[0-9]*", "kfd", "dxg", "dri/renderD*", "accel*", "davinci[0-9]*")
"""Files below /dev that a driver makes for its accelerators. Without one PyTorch finds none on Linux."""


def this_machine(dev: Path = Path("/dev")) -> Machine:
    """The facts of this machine. Accelerators are counted in a process of their own.

    Args:
        dev: the folder of device files. PyTorch, which takes seconds to import, is asked only if one of an
            accelerator is there, or if this is not Linux.
    """
    packages = ("deepspeed", "torchao", "tensorboard", "wandb", "mlflow")
    machine = Machine(tpu=is_tpu(os.environ), installed=tuple(filter(_is_installed, packages)))
    if sys.platform == "linux" and not any(any(dev.glob(pattern)) for pattern in DEVICES):
        return machine
    import torch  # noqa: PLC0415 - slow to import

    from fnaccel.launch.accelerators import count_accelerators  # noqa: PLC0415

    on_cuda = torch.cuda.is_available()
    return attrs.evolve(
        machine,
        accelerators=count_accelerators(),
        bf16=on_cuda and torch.cuda.is_bf16_supported(including_emulation=False),
        fp8=on_cuda and torch.cuda.get_device_capability() >= (8, 9),
    )


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
