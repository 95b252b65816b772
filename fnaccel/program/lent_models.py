"""Models of other train steps, lent for one call: seen by the loss, neither donated nor trained.

Their parameters take no gradient while they are lent. Gradients flow through them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from fnaccel.engine.engine import Engine
from fnaccel.errors import ArgumentError, CapabilityError
from fnaccel.state import TrainState, lease_of, refuse_averaged
from fnaccel.world.mesh import Mesh

if TYPE_CHECKING:
    from fnaccel.program.state_owner import StateOwner


@attrs.frozen
class LentModels:
    """The lent models by name, as the loss sees them, and the engines they live in."""

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


def lend(given: Mapping[str, Any], borrower: StateOwner) -> LentModels:
    """Check the states in `given=` and find their models.

    Raises:
        ArgumentError: a value is no state, or belongs to the borrower itself.
        CapabilityError: a model that tensor parallelism cuts, while the borrower's ranks have other rows.
        StaleStateError, UnleasedStateError: a state that is not live.
    """
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - the user's
        raise ArgumentError(
            f"given is {type(given).__name__}, not a dict of states",
            where="train_step(state, batch, given=...)",
            fix='given={"teacher": teacher_state}',
        )
    models: dict[str, Any] = {}
    engines: list[Engine] = []
    for name, state in given.items():
        if not isinstance(state, TrainState):
            raise ArgumentError(
                f"given[{name!r}] is {type(state).__name__}, not the state of a train step",
                where="train_step(state, batch, given=...)",
                fix='given={"teacher": teacher_state}',
            )
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
