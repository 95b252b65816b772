"""What `given=` hands to a loss for one call: models of other train steps, numbers, tensors and schedules.

Models are neither donated nor trained. Their parameters take no gradient while they are lent. Gradients flow
through them.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from fnaccel.engine.engine import Engine
from fnaccel.errors import ArgumentError, CapabilityError
from fnaccel.state import TrainState, lease_of, refuse_averaged
from fnaccel.step.loss import Scalar
from fnaccel.world.mesh import Mesh

if TYPE_CHECKING:
    from fnaccel.program.state_owner import StateOwner


@attrs.frozen
class LentModels:
    """The lent models and values by name, as the loss sees them, and the engines that models live in."""

    models: dict[str, Any]
    engines: tuple[Engine, ...]

    def within(self, run: Callable[[], Any]) -> Any:
        """`run()` inside the forward of every lent model, so that its parameters are whole."""
        for engine in self.engines:
            run = _inside(engine, run)
        return run()

    @contextlib.contextmanager
    def frozen(self) -> Generator[None]:
        """The lent parameters take no gradient in the body, and end as they were."""
        leaves = [leaf.param for engine in self.engines for leaf in engine.layout.leaves]
        for param in leaves:
            param.requires_grad_(False)
        try:
            yield
        finally:
            for param in leaves:
                param.requires_grad_(True)
            for engine in self.engines:
                if engine.hooks.settle is not None:
                    engine.hooks.settle()


def _inside(engine: Engine, run: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: engine.forward.lend(lambda _model: run())


def _check_rows(name: str, lent: Mesh, borrower: Mesh) -> None:
    parts, rows_shared_by = lent.degrees.get("tp", 1), borrower.degrees.get("tp", 1)
    if rows_shared_by % parts:  # groups along tp are neighbouring ranks
        raise CapabilityError(
            f"given[{name!r}] is cut over tensor({parts}), whose ranks must compute with the same rows, and "
            "ranks of this train step have different ones",
            where="train_step(state, batch, given=...)",
            fix=f"this train step under fa.tensor({parts}) too, times another axis; or the lent model under "
            "fa.ddp or fa.fsdp",
        )


def _value(name: str, value: Any, borrower: StateOwner, updates: Scalar) -> torch.Tensor:
    """A number, a tensor or a schedule's value as a tensor: a graph would be compiled for each number."""
    if callable(value) and not isinstance(value, torch.nn.Module):
        value = borrower.instance.updater.scheduled(value, updates)
    device = borrower.mesh.world.device
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, non_blocking=True)
    if not isinstance(value, numbers.Real):
        raise ArgumentError(
            f"given[{name!r}] is {type(value).__name__}, not the state of a train step, a number, a tensor "
            "or a schedule",
            where="train_step(state, batch, given=...)",
            fix='given={"teacher": teacher_state, "temperature": 0.5}',
        )
    whole = isinstance(value, numbers.Integral)
    return torch.full((), value, dtype=torch.int64 if whole else torch.float32, device=device)  # pyright: ignore[reportArgumentType, reportCallIssue]


def lend(given: Mapping[str, Any], borrower: StateOwner, updates: Scalar) -> LentModels:
    """Check the states in `given=` and find their models. Numbers and schedules become 0-d tensors.

    Raises:
        ArgumentError: a value is of another type, or a state belongs to the borrower itself.
        CapabilityError: a model that tensor parallelism cuts, while the borrower's ranks have other rows.
        StaleStateError, UnleasedStateError: a state that is not live.
    """
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - the user's
        raise ArgumentError(
            f"given is {type(given).__name__}, not a dict of states or values",
            where="train_step(state, batch, given=...)",
            fix='given={"teacher": teacher_state}',
        )
    models: dict[str, Any] = {}
    engines: list[Engine] = []
    for name, state in given.items():
        if not isinstance(state, TrainState):
            models[name] = _value(name, state, borrower, updates)
            continue
        owner = lease_of(state, f"given[{name!r}]").owner
        if owner is borrower:
            raise ArgumentError(
                f"given[{name!r}] is the state that this train step trains",
                where="train_step(state, batch, given=...)",
                fix="the loss has that model as its first argument already",
            )
        _check_rows(name, owner.mesh, borrower.mesh)
        refuse_averaged(owner.lease, "train_step(state, batch, given=...)")
        owner.instance.module_modes.train()  # their own modes, or evaluation mode without an optimizer
        engine: Engine = owner.instance.engine
        models[name] = engine.layout.model
        if engine not in engines:
            engines.append(engine)
    return LentModels(models, tuple(engines))
