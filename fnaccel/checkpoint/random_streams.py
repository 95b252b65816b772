"""The global random streams of a process as bytes: Python's, NumPy's, PyTorch's and the device's.

A train step seeds its model itself. These streams serve a loss, a data set without workers and the script
around them. Nothing is pickled: the layouts are fixed, little-endian.
"""

from __future__ import annotations

import importlib.util
import math
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any

import torch

from fnaccel.world.random_streams import generators_of, reseed

ROOT = "~streams"
"""The path of streams in a checkpoint, which no path in a tree can have."""

_PYTHON = struct.Struct("<625I?d")  # Mersenne twister, its position, the second normal deviate if any
_NUMPY = struct.Struct("<624Ii?d")  # in the same way


def capture(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of each stream of this process, as 1-d uint8 tensors by kind.

    NumPy's stream is left out if NumPy is not loaded, or its generator is not the Mersenne twister.
    """
    _, state, deviate = random.getstate()
    captured = {"python": _PYTHON.pack(*state, deviate is not None, deviate or 0.0)}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy_state: dict[str, Any] = numpy.random.get_state(legacy=False)
        if numpy_state["bit_generator"] == "MT19937":
            inner = numpy_state["state"]
            captured["numpy"] = _NUMPY.pack(
                *inner["key"].tolist(), inner["pos"], bool(numpy_state["has_gauss"]), numpy_state["gauss"]
            )
    tensors = {kind: torch.frombuffer(bytearray(data), dtype=torch.uint8) for kind, data in captured.items()}
    for generator in generators_of(device):
        tensors[_kind(generator)] = generator.get_state()
    return tensors


def check_sizes(streams: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> None:
    """See that stored streams can be those of this process.

    Raises:
        ValueError: one has another size or dtype, as another version of PyTorch may give it.
    """
    sizes = {"python": _PYTHON.size, "numpy": _NUMPY.size}
    sizes |= {_kind(generator): generator.get_state().numel() for generator in generators_of(device)}
    for kind, (dtype, shape) in streams.items():
        if kind in sizes and (dtype, shape) != (torch.uint8, (sizes[kind],)):
            raise ValueError(f"{kind} is {dtype} {list(shape)}, and {sizes[kind]} bytes here")


def check(streams: Mapping[str, torch.Tensor]) -> None:
    """Check that the generators accept streams of the right sizes.

    Raises:
        ValueError: bytes that are no stream's.
    """
    for kind, layout, most in (("python", _PYTHON, 624), ("numpy", _NUMPY, 624)):
        if kind in streams:
            *_, position, has, deviate = layout.unpack(bytes(streams[kind].tolist()))
            if not 0 <= position <= most or not math.isfinite(deviate) or not isinstance(has, bool):
                raise ValueError(f"{kind} stands at {position} of {most}")
    if "torch" in streams:
        try:
            torch.Generator().set_state(streams["torch"])
        except RuntimeError as error:
            raise ValueError(str(error)) from None


def put_back(streams: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set the streams of this process to the states of `capture`. `check` has checked them.

    A stream that this process does not have (another kind of device) is passed over.
    """
    for generator in generators_of(device):
        if _kind(generator) in streams:
            generator.set_state(streams[_kind(generator)])
    if "python" in streams:
        *state, has, deviate = _PYTHON.unpack(bytes(streams["python"].tolist()))
        random.setstate((random.getstate()[0], tuple(state), deviate if has else None))
    if "numpy" in streams and importlib.util.find_spec("numpy") is not None:
        import numpy as np  # noqa: PLC0415 - optional

        *key, position, has, deviate = _NUMPY.unpack(bytes(streams["numpy"].tolist()))
        inner = {"key": np.array(key, dtype=np.uint32), "pos": position}
        np.random.set_state(
            {"bit_generator": "MT19937", "state": inner, "has_gauss": int(has), "gauss": deviate}
        )


def begin_anew(seed: int, device: torch.device) -> None:
    """Seed all streams of this process."""
    reseed(seed)
    for generator in generators_of(device):
        generator.manual_seed(seed)


def _kind(generator: torch.Generator) -> str:
    return "torch" if generator.device.type == "cpu" else generator.device.type
