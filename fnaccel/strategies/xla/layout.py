"""Layouts of tensors over XLA devices: annotations that change a tensor's devices, never its values."""

# pyright: reportMissingImports=false, reportPrivateUsage=false
# ruff: noqa: SLF001 - torch_xla has no public name for the annotation that a tensor has
from __future__ import annotations

import warnings
import weakref
from collections import Counter
from typing import Any

import attrs
import torch

from fnaccel import tree
from fnaccel.errors import NotCompiledError
from fnaccel.strategies.xla.record import Xla
from fnaccel.tree import Tree

_ROWS = ("replicate", "shard")


@attrs.frozen(eq=False)
class Layout:
    """The devices as a grid: `replicas` groups of `group` devices.

    Attributes:
        mesh: torch_xla's, of shape `[replicas, group]`.
        devices, group: how many there are, and over how many a parameter is sharded.
    """

    mesh: Any
    devices: int
    group: int
    _kept: list[weakref.ref[torch.Tensor]] = attrs.field(factory=list[weakref.ref[torch.Tensor]], repr=False)
    _aliases: list[weakref.ref[torch.Tensor]] = attrs.field(
        factory=list[weakref.ref[torch.Tensor]], repr=False
    )

    @classmethod
    def of(cls, options: Xla) -> Layout:
        """The layout that a strategy asks for, over the devices that are there.

        Raises:
            ArgumentError: groups of that size don't make up the devices.
        """
        import numpy as np  # noqa: PLC0415 - torch_xla's meshes are numpy arrays
        import torch_xla.distributed.spmd as xs  # noqa: PLC0415 - an extra
        import torch_xla.runtime as xr  # noqa: PLC0415

        devices: int = xr.global_runtime_device_count()
        group = options.group(devices)
        mesh = xs.Mesh(np.arange(devices), (devices // group, group), _ROWS)
        return cls(mesh, devices, group)

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """Lay a parameter, a slot or an average out, now and whenever a step ends."""
        self._kept.append(weakref.ref(value))
        if not self._shard(value) and value.dim():
            # replicated explicitly: a graph of several devices without any annotation aborted the process
            self._mark(value, (None,) * value.dim())
        return value

    def alias(self, value: torch.Tensor) -> torch.Tensor:
        """Note another handle of a tensor that is kept."""
        self._aliases.append(weakref.ref(value))
        return value

    def spread(self, batch: Tree) -> Any:
        """Spread the rows of a batch over all devices. If they don't divide, each device takes all.

        The number of rows is the most common length of its tensors. Other lengths need not divide.
        """
        tensors = [value for value in tree.leaves(batch) if isinstance(value, torch.Tensor)]
        tensors = [value for value in tensors if value.device.type == "xla" and value.dim() and len(value)]
        lengths = Counter(len(value) for value in tensors)
        rows = max(lengths, key=lambda length: (lengths[length], length), default=0)
        if rows % self.devices:
            # XLA pads: its partitioner was seen to abort the process on the backward of an embedding
            warnings.warn(
                f"{rows} rows don't divide over {self.devices} XLA devices: each computes all of them "
                "(cut batches and micro-batches in multiples, and fa.shard(loader, remainder='drop'))",
                stacklevel=2,
            )
        for value in tensors:
            first = None if len(value) % self.devices else _ROWS
            self._mark(value, (first, *(None,) * (value.dim() - 1)))
        return batch

    def carry_out(self) -> None:
        """Run the recorded operations as one graph. The host does not wait for it.

        Raises:
            NotCompiledError: XLA can't compile the graph. Its results are lost.
        """
        import torch_xla  # noqa: PLC0415 - an extra

        self._kept[:] = [ref for ref in self._kept if ref() is not None]
        for ref in self._kept:
            value = ref()
            if value is not None:
                self._shard(value)  # a tensor written in place as a whole loses its annotation
        try:
            torch_xla.sync()
        except (RuntimeError, ValueError) as error:
            self._forget()  # or every later graph would contain the operation that failed
            raise NotCompiledError(
                f"XLA can't compile or run the recorded step: {str(error).splitlines()[0]}",
                where="the graph of a step",
                fix="see whether an operation mixes dtypes, which torch refuses at once and XLA here; the "
                "parameters are lost: fa.restore(directory, like=train_step.init())",
            ) from error

    def _forget(self) -> None:
        """Empty parameters, slots and averages, so that no later graph contains the failed operations."""
        for ref in (*self._kept, *self._aliases):
            value = ref()
            if value is not None:
                value.data = torch.zeros(0, dtype=value.dtype).to(value.device)  # its shape is lost as well
                value.grad = None

    def _shard(self, value: torch.Tensor) -> bool:
        """Spread a tensor over its group along the widest dimension that divides. False if there is none."""
        if self.group == 1 or not value.numel():
            return False
        fitting = [dim for dim in range(value.dim()) if value.shape[dim] % self.group == 0]
        if not fitting:
            return False
        widest = max(fitting, key=lambda dim: (value.shape[dim], -dim))
        self._mark(value, tuple("shard" if dim == widest else None for dim in range(value.dim())))
        return True

    def _mark(self, value: torch.Tensor, spec: tuple[Any, ...]) -> None:
        import torch_xla  # noqa: PLC0415 - an extra
        import torch_xla.distributed.spmd as xs  # noqa: PLC0415

        annotation: str = torch_xla._XLAC._get_xla_sharding_spec(value)
        if "devices=" in annotation:
            return
        if annotation:
            xs.clear_sharding(value)
        xs.mark_sharding(value, self.mesh, spec)
