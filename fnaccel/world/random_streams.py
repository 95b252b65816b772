"""The random streams of this process, and seeds for them."""

from __future__ import annotations

import random
import sys
from typing import Any

import attrs
import torch

_MASK = (1 << 64) - 1


def fold(root: int, *parts: int) -> int:
    """Mix integers into one 63-bit seed (splitmix64, Steele et al. 2014), without a generator."""
    value = 0
    for part in (root, *parts):
        value = (value ^ part) + 0x9E3779B97F4A7C15 & _MASK
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value >> 1


def reseed(seed: int) -> None:
    """Seed `random`, PyTorch's CPU generator, and NumPy's global one if NumPy is loaded."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@attrs.frozen
class ModuleStream:
    """The random stream of a device whose torch module has functions for it, and no generator to take."""

    device: torch.device

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    def get_state(self) -> torch.Tensor:
        """Its state, a 1-d uint8 tensor on the CPU."""
        return self._module.get_rng_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Go to a state."""
        self._module.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Restart from a seed."""
        self._module.manual_seed(seed)


@attrs.frozen
class XlaStream:
    """XLA's random stream: one number, which a graph takes as an input, so that no seed is compiled in."""

    device: torch.device

    def get_state(self) -> torch.Tensor:
        """Its state, 8 bytes."""
        import torch_xla.core.xla_model as xm  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

        seed: int = xm.get_rng_state(str(self.device))
        return torch.frombuffer(bytearray(seed.to_bytes(8, "little")), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        """Go to a state."""
        self.manual_seed(int.from_bytes(bytes(state.tolist()), "little"))

    def manual_seed(self, seed: int) -> None:
        """Restart from a seed."""
        import torch_xla.core.xla_model as xm  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

        xm.set_rng_state(seed % 2**64, str(self.device))


def stream_of(device: torch.device) -> Any:
    """The random stream of a device other than the CPU: a torch.Generator, or an object with its methods."""
    if device.type == "xla":
        return XlaStream(device)
    module = torch.get_device_module(device)
    if hasattr(module, "default_generators"):
        return module.default_generators[device.index or 0]
    return ModuleStream(device)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The random streams that a forward on `device` may draw from: torch's default generators."""
    generators = [torch.default_generator]
    if device.type != "cpu":
        generators.append(stream_of(device))
    return generators
