"""A parameter's values as DeepSpeed keeps them: whole in fp32, read and written by name.

Through DeepSpeed's own accessors (https://deepspeed.readthedocs.io/en/latest/zero3.html#debugging) where it
has one. Stage 0, frozen parameters and the creation of optimizer slots have none. Checked with 0.19.8.
"""

# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001 - DeepSpeed has no public name for these
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fnaccel.errors import CapabilityError, StaleStateError
from fnaccel.strategies.deepspeed.comm import part_of_package
from fnaccel.tree import Tree

Native = Any
"""DeepSpeed's engine, which has no types."""


class Parts:
    """The parameters of one DeepSpeed engine.

    Args:
        engine: the engine that `deepspeed.initialize` returned.
        stage: its ZeRO stage.
    """

    def __init__(self, engine: Native, stage: int) -> None:
        self._engine = engine
        self.stage = stage
        self.closed = False
        outer: Any = engine.optimizer
        # the torch optimizer inside, whose slots these are
        self.inner: Any = getattr(outer, "optimizer", outer)
        self._masters: dict[Any, torch.Tensor] = {}
        for half, full in zip(
            getattr(outer, "fp16_groups", ()), getattr(outer, "fp32_groups", ()), strict=False
        ):
            if stage == 0:
                self._masters.update(zip(half, full, strict=True))

    def shape(self, param: torch.Tensor) -> torch.Size:
        """The shape of the whole parameter."""
        return getattr(param, "ds_shape", param.shape)

    def read(self, param: torch.Tensor, slot: str | None = None) -> torch.Tensor:
        """A copy of the whole fp32 parameter, or of one of its slots. Collective."""
        self._check_open()
        if not param.requires_grad:
            with _gathered(param):
                return param.detach().clone().float()
        if self.stage == 0:
            return self._held(param, slot).detach().clone()
        accessors = part_of_package("utils")
        whole = (
            accessors.safe_get_full_fp32_param(param)
            if slot is None
            else accessors.safe_get_full_optimizer_state(param, slot)
        )
        return whole.detach().clone().view(self.shape(param))

    def write(self, param: torch.Tensor, value: torch.Tensor, slot: str | None = None) -> None:
        """Set the whole fp32 parameter and the copy that the forward uses, or one of its slots."""
        self._check_open()
        with torch.no_grad():
            if not param.requires_grad:
                with _gathered(param, modifier_rank=0):
                    param.data.copy_(value)
            elif self.stage == 0:
                self._held(param, slot).copy_(value)
                if slot is None:
                    param.copy_(value)
            elif self.stage < 3:
                self._write_mapped(param, value, slot)
            else:
                self._write_partition(param, value, slot)

    def _check_open(self) -> None:
        if self.closed:
            raise StaleStateError(
                "a value of a train step that was closed was used",
                where="a leaf of a state under fa.deepspeed",
                fix="keep a copy before close(): value.full_tensor(), or fa.snapshot(state)",
            )

    def _held(self, param: torch.Tensor, slot: str | None) -> Any:
        """The tensor that stage 0 updates (the parameter, or its fp32 copy if it is half), or its slot."""
        master = self._masters.get(param, param)
        return master if slot is None else self.inner.state[master][slot]

    def _write_mapped(self, param: torch.Tensor, value: torch.Tensor, slot: str | None) -> None:
        accessors = part_of_package("utils")
        if slot is None:
            accessors.safe_set_full_fp32_param(param, value)
            param.data.copy_(value)
        else:
            accessors.safe_set_full_optimizer_state(param, value, slot)

    def _write_partition(self, param: Tree, value: torch.Tensor, slot: str | None) -> None:
        accessors = part_of_package("utils")
        piece = self._partition(param, value)
        if slot is not None:
            accessors.safe_set_local_optimizer_state(param, piece, slot)
            return
        accessors.safe_set_local_fp32_param(param, piece)
        shard: torch.Tensor = param.ds_tensor
        if shard.numel() == piece.numel():
            shard.data.copy_(piece)
        else:  # swapped out to a disk: DeepSpeed writes the group that it lies in
            optimizer = self._engine.optimizer
            group = optimizer.grad_position[optimizer.get_param_id(param)][0]
            optimizer._partitioned_params_swap_out(group)
        if param.data.shape == value.shape:  # small ones stay gathered
            param.data.copy_(value)

    def _partition(self, param: Tree, value: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the flat parameter, padded as DeepSpeed pads it."""
        optimizer = self._engine.optimizer
        each = param.ds_tensor.ds_numel
        start = each * optimizer._get_param_partition_rank(param)
        flat = value.flatten()[start : start + each]
        return torch.nn.functional.pad(flat, (0, each - flat.numel()))

    def make_slots(self) -> tuple[str, ...]:
        """Let the optimizer make its slots before the first step, at their first values. Returns their names.

        DeepSpeed leaves that to the first update, which a state can't wait for: it has one structure.

        Raises:
            CapabilityError: a slot that is not shaped like its parameter.
        """
        targets = list(self._updated())
        rates = [(group, {name: group[name] for name in ("lr", "weight_decay") if name in group})
                for group in self.inner.param_groups]  # fmt: skip
        grads = [target.grad for target in targets]
        for group, values in rates:
            group.update(dict.fromkeys(values, 0.0))  # nothing moves, and decay makes no gradient
        for target in targets:
            target.grad = torch.zeros_like(target)
        groups = [group["params"] for group in self.inner.param_groups]
        if self.stage == 3:  # DeepSpeed fills its groups for each update, and empties them
            self.inner.param_groups[0]["params"] = targets
        try:
            self.inner.step()
        finally:
            for target, grad in zip(targets, grads, strict=True):
                target.grad = grad
            for (group, values), params in zip(rates, groups, strict=True):
                group.update(values)
                group["params"] = params
        names: dict[str, None] = {}
        for target in targets:
            for name, value in self.inner.state[target].items():
                if name == "step":
                    continue
                if not isinstance(value, torch.Tensor) or value.shape != target.shape:
                    raise CapabilityError(
                        f"the slot {name!r} of {type(self.inner).__name__} is not shaped like its parameter, "
                        "and DeepSpeed partitions elements",
                        where="fa.deepspeed",
                        fix="choose an elementwise optimizer: fa.sgd, fa.adam, fa.adamw, RMSprop, Adagrad",
                    )
                names[name] = None
        self.count(0)
        link: Any = getattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if self.stage in (1, 2) and link is not None:
            link()
        return tuple(names)

    def count(self, updates: int) -> None:
        """Let the optimizer's own count be the number of updates so far."""
        for state in self.inner.state.values():
            step = state.get("step")
            if isinstance(step, torch.Tensor):
                step.fill_(updates)
            elif step is not None:
                state["step"] = updates

    def _updated(self) -> Iterator[torch.Tensor]:
        outer = self._engine.optimizer
        if self.stage == 3:
            yield from outer.fp32_partitioned_groups_flat
        elif self.stage > 0:
            yield from outer.single_partition_of_fp32_groups
        else:
            for group in self.inner.param_groups:
                yield from group["params"]


def _gathered(
    param: torch.Tensor, modifier_rank: int | None = None
) -> contextlib.AbstractContextManager[object]:
    """Have a frozen parameter whole while the body runs. Values that `modifier_rank` wrote to it stay."""
    if not hasattr(param, "ds_id"):
        return contextlib.nullcontext()
    return part_of_package("runtime.zero").GatheredParameters([param], modifier_rank=modifier_rank)
