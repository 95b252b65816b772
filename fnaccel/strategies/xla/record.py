"""`xla(...)`: the options of the strategy, and the devices it can run on. Its engine is in `engine`."""

from __future__ import annotations

from typing import ClassVar

import attrs

from fnaccel.errors import ArgumentError, WorldError
from fnaccel.extend import Axis, Capability, Spec, Strategy, maker


@attrs.frozen
class Xla(Axis):
    """All XLA devices of this machine: see `xla`. They are no ranks."""

    maker: ClassVar[str] = "xla"
    runs_on: ClassVar[str] = "xla"
    shard: bool | int = False
    degree: int = 1

    @property
    def capabilities(self) -> frozenset[Capability]:
        """No MODULE transforms and no compiler: the whole step is compiled anyway."""
        # and torch.utils.checkpoint needs a module torch.xla, which does not exist
        return frozenset({Capability.GRADIENTS, Capability.PARAMETERS})

    def group(self, devices: int) -> int:
        """Over how many of `devices` each parameter is sharded.

        Raises:
            ArgumentError: groups of that size don't make up the devices.
        """
        if isinstance(self.shard, bool):
            return devices if self.shard else 1
        if devices % self.shard:
            fits = [str(n) for n in range(1, devices + 1) if devices % n == 0]
            raise ArgumentError(
                f"{devices} devices can't be parted in groups of {self.shard}",
                where=f"fa.xla(shard={self.shard})",
                fix=f"choose one of: {', '.join(fits)}; or shard=True for all",
            )
        return self.shard

    def check(self, spec: Spec) -> None:
        """Raise WorldError elsewhere than on XLA devices."""
        device = spec.mesh.world.device.type
        if device != "xla":
            raise WorldError(
                f"{spec.strategy} runs on XLA devices, and this world computes on {device}",
                where="fa.train_step",
                fix="fa.start(device='xla'), or start with: fnaccel launch --tpu",
            )

    def plan_notes(self, spec: Spec) -> list[str]:  # noqa: ARG002
        """The number of devices, and whether they shard parameters."""
        import torch_xla.runtime as xr  # noqa: PLC0415 - an extra  # pyright: ignore[reportMissingImports]

        devices: int = xr.global_runtime_device_count()
        group = self.group(devices)
        layout = f"sharded over {group}" if group > 1 else "whole on each"
        return [
            f"{devices} XLA devices ({xr.device_type()}): rows are spread over all, parameters are {layout}"
        ]


@maker
def xla(shard: bool | int = False) -> Strategy:
    """Train on all XLA devices of this machine (TPUs) from one process, by SPMD (Xu et al. 2021).

    The process feeds the global batch. Its rows are spread over the devices, and XLA adds the collectives
    (https://docs.pytorch.org/xla/master/perf/spmd_basic.html). A step is one graph, compiled once for each
    shape of batch: give batches of one size (`fa.shard(loader, remainder="drop")`). Needs
    `fa.start(device="xla")`.

    Args:
        shard: False: every device holds all parameters, as under `ddp`. True: parameters, gradients and
            optimizer slots are sharded over all devices, as under `fsdp`. A number: over groups of that
            many devices, replicated between groups, as under `hsdp`.

    Raises:
        ArgumentError: a number below 1. At `init`, groups that don't make up the devices.
        WorldError: in `fa.train_step`, if the world computes on another device.

    Example:
        >>> fa.distribute(GPT, fa.xla(shard=True))
    """
    if not isinstance(shard, int) or (not isinstance(shard, bool) and shard < 1):
        raise ArgumentError(
            f"parameters can't be sharded over {shard!r} devices",
            where="fa.xla(shard=)",
            fix="True for all devices, False for none, or a number from 1",
        )
    return Strategy((Xla(shard),))
