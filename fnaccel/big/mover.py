"""Moves tensors between devices: at once, or on a stream beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fnaccel.big.budget import Device
from fnaccel.errors import CapabilityError
from fnaccel.texts import counted


class Mover:
    """Moves tensors by the names of devices in a map. Tests inject one that only notes the moves.

    Run on one GPU (`tests/gpu`). Not run on hardware: several of them.

    Example:
        >>> class Noting(fa.big.Mover):
        ...     def move(self, tensor, device):
        ...         print(tuple(tensor.shape), "to", device)
        ...         return super().move(tensor, device)
        >>> model = torch.nn.Linear(4, 2, bias=False).requires_grad_(False)
        >>> run = fa.big.dispatch(model, {"": "disk"}, folder="offload", mover=Noting())
    """

    def __init__(self) -> None:
        self._streams: dict[Device, torch.Stream] = {}

    def shown(self, device: Device) -> torch.device:
        """The device that weights of a layer show while they are elsewhere."""
        return torch_device(device)

    def check(self, device: Device) -> None:
        """See that this machine has a device.

        Raises:
            CapabilityError: it has not.
        """
        if device in ("cpu", "disk"):
            return
        count = torch.accelerator.device_count()
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if index >= count:
            raise CapabilityError(
                f"the map names the device {device!r}, and this machine has "
                f"{counted(count, 'accelerator') if count else 'no accelerators'}",
                where="a device map",
                fix="make a map of a budget that names devices of this machine",
            )

    def device_of(self, tensor: torch.Tensor) -> Device:
        """The name of a tensor's device."""
        return "cpu" if tensor.device.type == "cpu" else tensor.device.index

    def move(self, tensor: torch.Tensor, device: Device) -> torch.Tensor:
        """A tensor on a device: itself if it is there."""
        return tensor.to(torch_device(device))

    def fetch(self, tensors: Sequence[torch.Tensor], device: Device) -> Callable[[], list[torch.Tensor]]:
        """Begin to copy tensors to a device. Called in a thread beside the computation.

        Returns:
            A function for the thread that computes. It gives the copies, in the same order.
        """
        if device == "cpu":
            copies = [self.move(tensor, device) for tensor in tensors]
            return lambda: copies
        place = torch_device(device)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device=place)
        with stream:
            copies = [tensor.to(place, non_blocking=True) for tensor in tensors]
            copied = stream.record_event()

        def hand_over() -> list[torch.Tensor]:
            current = torch.accelerator.current_stream(place)
            current.wait_event(copied)
            for copy in copies:
                copy.record_stream(current)
            return copies

        return hand_over

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the memory of the host, pinned if there is an accelerator."""
        host = tensor.to("cpu")
        return host.pin_memory() if torch.accelerator.is_available() else host


def torch_device(device: Device) -> torch.device:
    """The device of torch that a map names."""
    if isinstance(device, str):
        return torch.device(device)
    kind = torch.accelerator.current_accelerator()
    return torch.device("cuda" if kind is None else kind.type, device)
