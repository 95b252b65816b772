"""A whole model away from its device: layer by layer, or as one that takes turns with others."""

from __future__ import annotations

import os

from torch import nn

from fnaccel.big.budget import Device
from fnaccel.big.dispatch import Dispatch, dispatched
from fnaccel.big.mover import Mover
from fnaccel.big.planning import Options
from fnaccel.errors import ArgumentError
from fnaccel.world.paths import optional_path


def offload(
    model: nn.Module,
    device: Device = 0,
    home: Device = "cpu",
    *,
    folder: str | os.PathLike[str] | None = None,
    prefetch: int = 1,
    offload_buffers: bool = False,
    keep: bool = False,
    after: Dispatch | None = None,
    mover: Mover | None = None,
) -> Dispatch:
    """Keep all parameters of a model in host memory or on the disk, and run it on a device.

    With `keep=True` the model comes to its device whole when it is called, and stays there until
    `send_home()`, or until a model that names it in `after=` is called. That suits several models in a loop.

    Args:
        model: a module with values.
        device: the device that runs it.
        home: `"cpu"` or `"disk"`.
        folder: for `home="disk"`.
        prefetch: how many layers are fetched ahead.
        offload_buffers: fetch buffers too.
        keep: fetch the model whole, and leave it on the device.
        after: the dispatch of a model that is sent home when this one is called.
        mover: copies tensors. Tests inject one.

    Raises:
        ArgumentError: another home, a folder that is missing or too small, a tensor without values.
        CapabilityError: this machine lacks the device.
        OwnershipError: the module is dispatched already.

    Example:
        >>> model = torch.nn.Linear(4, 2).requires_grad_(False)
        >>> run = fa.big.offload(model, device="cpu", home="disk", folder="offload")
        >>> model(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """
    if home not in ("cpu", "disk"):
        raise ArgumentError(f"{home!r} is no home", where="fa.big.offload", fix='home="cpu" or home="disk"')
    options = Options(
        folder=optional_path(folder, "fa.big.offload"),
        device=device,
        prefetch=0 if keep else prefetch,
        offload_buffers=offload_buffers,
        mover=mover or Mover(),
        keep=keep,
        after=after,
    )
    return dispatched(model, {"": home}, {}, options)
