"""`momentum_teacher`: a model whose parameters are an average of another's, as in BYOL, DINO and MoCo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from fnaccel import _torch
from fnaccel.extend import (
    Capability,
    CapabilityError,
    Info,
    Phase,
    Spec,
    Transform,
    require,
    takes_step,
)
from fnaccel.tree import Tree

_WHERE = "fa.transforms.momentum_teacher"
Decay = float | Callable[[Any], Any]


@attrs.frozen
class MomentumTeacher:
    """`teacher = decay * teacher + (1 - decay) * student` after each applied update."""

    teacher: str
    student: str
    decay: Decay

    def check(self, spec: Spec) -> None:
        """Raise unless there are these models, the teacher is not trained, and ranks hold the same one."""
        if spec.strategy.apart():
            raise CapabilityError(
                "replicas train apart, and only what is trained is averaged: each would have another teacher",
                where=f"{_WHERE} under {spec.strategy}",
                fix="fa.ddp() or fa.fsdp()",
            )
        names = list(spec.model) if isinstance(spec.model, Mapping) else []
        trained = spec.optimizers or {}
        for role, name, is_trained in (("teacher", self.teacher, False), ("student", self.student, True)):
            require(
                name in names,
                f"{role}={name!r}, and the models are {names or 'one, without a name'}",
                _WHERE,
                'fa.distribute({"student": GPT, "teacher": "student"})',
            )
            require(
                (name in trained) is is_trained,
                f"the {role} {name!r} has {'no' if is_trained else 'an'} optimizer",
                _WHERE,
                f'fa.train_step(..., optimizer={{"{self.student}": fa.adamw(3e-4)}})',
            )

    def on_update(self, engine: Any, state: Tree, info: Info) -> Any:
        """Move the parameters, sharded as they are, unless the update was skipped. Buffers are copied."""
        decay = self.decay(info.updates) if callable(self.decay) else self.decay
        weight = 1.0 - decay if info.skip is None else (1.0 - decay) * (1.0 - info.skip)
        with torch.no_grad():
            _torch.foreach_lerp_(*self._pairs(engine.layout.parameters), weight)
            for own, new in zip(*self._pairs(engine.layout.buffers), strict=True):
                own.copy_(new)
        return state

    def _pairs(self, values: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's parts of the teacher's tensors, and of the student's that have the same names."""
        pairs = [
            (value, values.get(f"{self.student}/{name}"))
            for path, value in values.items()
            for model, _, name in (path.partition("/"),)
            if model == self.teacher
        ]
        require(
            all(new is not None and own.shape == new.shape for own, new in pairs),
            f"{self.student!r} has not the tensors of {self.teacher!r}, by names and shapes",
            _WHERE,
            f'begin with a copy: fa.distribute({{..., "{self.teacher}": "{self.student}"}})',
        )
        parts = [(_torch.local_of(own), _torch.local_of(new)) for own, new in pairs if new is not None]
        return [own for own, _ in parts], [new for _, new in parts]


@takes_step
def momentum_teacher(teacher: str = "teacher", student: str = "student", decay: Decay = 0.996) -> Transform:
    """Let one model be an average of another: BYOL (arXiv:2006.07733), DINO, MoCo (arXiv:1911.05722).

    Parameters of the teacher move after each applied update. Its buffers, such as running statistics, become
    those of the student. Both models are part of one train step, and the teacher has no optimizer, so it runs
    in evaluation mode.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        teacher, student: their names.
        decay: the share of the old teacher that each update keeps, in [0, 1]. Or a schedule, a function of
            the number of updates before this one.

    Raises:
        ArgumentError: no such model, a teacher with an optimizer or a student without one, or a decay outside
            [0, 1]. At the first update: models of different shapes.
        CapabilityError: replicas train apart (`fa.local_sgd`).

    Example:
        >>> def loss_fn(model, batch):
        ...     with torch.no_grad():
        ...         wanted = model["teacher"](batch["tokens"])
        ...     return torch.nn.functional.mse_loss(model["student"](batch["tokens"]), wanted)
        >>> step = fa.transforms.momentum_teacher(loss_fn, decay=0.99)
        >>> model = fa.distribute({"student": GPT, "teacher": "student"}, "local")
        >>> train_step = fa.train_step(step, model=model, optimizer={"student": fa.adamw(3e-4)})
        >>> state, metrics = train_step(train_step.init(), batch)
    """
    in_range = callable(decay) or (isinstance(decay, int | float) and 0 <= decay <= 1)
    require(in_range, f"a teacher can't decay by {decay!r}", _WHERE, "decay is in [0, 1], or a schedule")
    return Transform(
        "momentum_teacher",
        Phase.UPDATE,
        apply=MomentumTeacher(teacher, student, decay),
        needs={Capability.PARAMETERS},
        repeatable=True,
    )
