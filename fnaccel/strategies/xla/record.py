"""`xla(...)`: what the strategy may be told, and where it can run. What is made of it is in `engine`."""

from __future__ import annotations

from typing import ClassVar

import attrs

from fnaccel.errors import ArgumentError, WorldError
from fnaccel.step.step import Capability
from fnaccel.strategies.strategy import Strategy, maker
from fnaccel.world.world import World


@attrs.frozen
class Xla:
    """All XLA devices of this machine; see `xla`."""

    axis: ClassVar[str] = "xla"
    maker: ClassVar[str] = "xla"
    # torch.utils.checkpoint needs a module torch.xla, which does not exist; the whole step is compiled anyway
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.GRADIENTS, Capability.PARAMETERS})

    shard: bool | int = False
    degree: int = 1

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


@attrs.frozen
class XlaStrategy(Strategy):
    """The product that is `xla` alone: its devices are no ranks, so it takes none of a mesh."""

    def degrees(self) -> list[tuple[str, int]]:
        """No axes of ranks."""
        return []


@maker
def xla(shard: bool | int = False) -> Strategy:
    """Train on all XLA devices of this machine (TPUs) from one process, by SPMD (Xu et al. 2021).

    The process feeds the global batch; its rows are spread over the devices, and XLA adds the collectives
    (https://docs.pytorch.org/xla/master/perf/spmd_basic.html). A step is one graph, compiled once for each
    shape of batch: give batches of one size (`fa.shard(loader, remainder="drop")`). Needs
    `fa.start(device="xla")`.

    Args:
        shard: False: every device holds all parameters, as under `ddp`. True: parameters, gradients and
            optimizer slots are sharded over all devices, as under `fsdp`. A number: over groups of that
            many devices, replicated between groups, as under `hsdp`.

    Raises:
        ArgumentError: a number below 1; at `init`, groups that don't make up the devices.
        WorldError: in `fa.train_step`, where the world computes on another device.

    Example: `fa.distribute(GPT, fa.xla(shard=True))`.
    """
    if not isinstance(shard, int) or (not isinstance(shard, bool) and shard < 1):
        raise ArgumentError(
            f"parameters can't be sharded over {shard!r} devices",
            where="fa.xla(shard=)",
            fix="True for all devices, False for none, or a number from 1",
        )
    return XlaStrategy((Xla(shard),))


def device_notes(strategy: Strategy, world: World) -> list[str]:
    """What a plan has to say of XLA devices; empty without any.

    Raises:
        WorldError: `xla` elsewhere than on XLA devices, or another strategy there.
        ArgumentError: groups that don't make up the devices.
    """
    options: Xla | None = strategy.find(Xla)
    if world.device.type != "xla":
        if options is None:
            return []
        raise WorldError(
            f"{strategy} runs on XLA devices, and this world computes on {world.device.type}",
            where="fa.train_step",
            fix="fa.start(device='xla'), or start with: fnaccel launch --tpu",
        )
    if options is None:
        raise WorldError(
            f"{strategy} does not know XLA devices: nothing would end the graph of a step",
            where="fa.train_step",
            fix="fa.distribute(model, fa.xla()); or fa.xla(shard=True) for the memory of fsdp",
        )
    import torch_xla.runtime as xr  # noqa: PLC0415 - an extra  # pyright: ignore[reportMissingImports]

    devices: int = xr.global_runtime_device_count()
    group = options.group(devices)
    held = f"sharded over {group}" if group > 1 else "whole on each"
    return [f"{devices} XLA devices ({xr.device_type()}): rows are spread over all, parameters are {held}"]
