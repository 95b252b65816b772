"""The facts about a run's machine and versions that its log and its report show."""

from __future__ import annotations

import platform
import sys

import torch

from fnaccel.world.world import World


def environment(world: World) -> dict[str, str]:
    """Versions, device and ranks, by name.

    Args:
        world: the ranks.
    """
    device = world.device
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return {
        "fnaccel": sys.modules["fnaccel"].__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "device": f"{device.type}{name}",
        "ranks": str(world.size),
    }
