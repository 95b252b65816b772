"""The plan of a train step: validated, ordered, printable, comparable before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import attrs

from fnaccel.errors import CapabilityError, PlanMismatchError, RepeatedTransformError
from fnaccel.step.callables import digest, functions_in, plan_text, title
from fnaccel.step.html_table import table
from fnaccel.step.spec import Spec, check, plan_notes
from fnaccel.step.step import Phase, Step, Transform
from fnaccel.strategies.runtime import Delegation

_DIVIDED = {
    "": "d(sum of totals) / (sum of weights), over micro-batches and ranks",
    "rows": "d(sum of totals) / (mean weight of a rank), over micro-batches of each rank",
    "replicas": "d(sum of totals) / (sum of weights), over micro-batches and ranks of each replica",
}
"""What the gradients of a step are, by the weighting of an axis whose ranks train apart."""


@attrs.frozen
class Row:
    """One line of a plan: phase, transform, details, and the runtime that carries it out."""

    phase: str
    what: str
    detail: str
    by: str = "fnaccel"


@attrs.frozen
class Plan:
    """The operations of a train step, in order. `str(plan)` is meant to be read.

    Example:
        >>> print(train_step.plan)
        train step of ...
          on local(): 1 rank (cpu)
          ...
          UPDATE   sgd ...
    """

    title: str
    layout: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    digests: tuple[tuple[str, str], ...]
    """(name, digest) of each function, so that ranks running different code are told apart."""
    runtime: str | None = None
    """The configuration of the runtime behind the strategy, as JSON. None without a runtime."""

    @property
    def deepspeed(self) -> dict[str, Any]:
        """A copy of DeepSpeed's complete configuration.

        Raises:
            CapabilityError: the strategy is another.
        """
        if self.runtime is None:
            raise CapabilityError(
                "this train step does not run on DeepSpeed",
                where="train_step.plan.deepspeed",
                fix="fa.distribute(model, fa.deepspeed(stage=2))",
            )
        return json.loads(self.runtime)

    def __str__(self) -> str:
        width = max((len(row.what) for row in self.rows), default=0)
        lines = [f"train step of {self.title}", f"  on {self.layout}"]
        for row in self.rows:
            by = "" if row.by == "fnaccel" else f"  [by {row.by}]"
            lines.append(f"  {row.phase:<9}{row.what:<{width}}  {row.detail}{by}".rstrip())
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(row.phase, row.what, row.detail, row.by) for row in self.rows]
        return table(f"train step of {self.title} on {self.layout}", rows, self.notes)

    @property
    def hash(self) -> str:
        """64 hex digits, equal on ranks that run the same plan."""
        text = "\n".join([str(self), *(f"{name} {digest}" for name, digest in self.digests)])
        return hashlib.sha256(text.encode()).hexdigest()


def order(step: Step) -> tuple[Transform, ...]:
    """The transforms by phase, in written order within a phase.

    Raises:
        RepeatedTransformError: one that may stand once stands twice (a Step built by hand).
    """
    seen: set[str] = set()
    for transform in step.transforms:
        if transform.name in seen and not transform.repeatable:
            raise RepeatedTransformError(
                f"{transform.name} was applied twice",
                where=f"step of {title(step.loss_fn)}",
                fix="apply it once",
            )
        seen.add(transform.name)
    return tuple(sorted(step.transforms, key=lambda t: (t.phase, getattr(t.apply, "last_of_phase", False))))


def make_plan(spec: Spec, optimizer: object, delegation: Delegation | None = None) -> Plan:
    """Validate a step against a strategy and describe it. Work of a runtime is marked.

    Args:
        spec: the train step, its transforms resolved.
        optimizer: the optimizers as the user gave them.
        delegation: the work that a runtime carries out.

    Raises:
        CapabilityError: a transform needs a capability that the strategy lacks.
    """
    step, strategy, mesh = spec.step, spec.strategy, spec.mesh
    ordered = order(step)
    able = strategy.capabilities()
    delegated = frozenset[str]() if delegation is None else delegation.names
    by = spec.runtime
    for transform in ordered:
        lacking = frozenset() if transform.name in delegated else transform.needs - able
        if lacking:
            raise CapabilityError(
                f"{transform.name} needs {', '.join(sorted(lacking))}, which {strategy} can't do",
                where=f"step of {title(step.loss_fn)}",
                fix=transform.apply.alternative(able)
                if hasattr(transform.apply, "alternative")
                else f"remove {transform.name}, or choose another strategy",
            )
    check(spec)
    notes = plan_notes(spec)
    if delegation is not None:
        notes += delegation.notes
    if spec.rng == "stream":
        notes.append("randomness is PyTorch's own stream: it depends on the number of ranks")

    def row(t: Transform) -> Row:
        return Row(t.phase.name, t.name, t.describe(), by if t.name in delegated else "fnaccel")

    rows = [row(t) for t in ordered if t.phase < Phase.GRADS]
    weighted = step.settings.weight_fn is not None
    rows.append(
        Row(
            "BACKWARD",
            "gradients",
            _DIVIDED[next((axis.weighting for axis in strategy.axes if not axis.averages), "")]
            + ("; divided up front" if weighted else ""),
            by or "fnaccel",
        )
    )
    rows += [row(t) for t in ordered if t.phase == Phase.GRADS]
    rows += _optimizer_rows(optimizer, spec.frozen, by or "fnaccel")
    rows += [row(t) for t in ordered if t.phase > Phase.GRADS]
    config = None if delegation is None else json.dumps(delegation.config, sort_keys=True)
    functions = [
        ("loss", step.loss_fn),
        *((t.name, t.apply) for t in ordered if not attrs.has(type(t.apply))),
        *(pair for t in ordered for pair in functions_in(t.name, t.apply)),
        *functions_in("frozen", spec.frozen),
        *(pair for axis in strategy.axes for pair in functions_in(type(axis).__name__, axis)),
        *(pair for one in (spec.optimizers or {}).values() for pair in functions_in(one.name, one)),
    ]
    world = mesh.world
    axes = ", ".join(f"{name}={degree}" for name, degree in mesh.degrees.items())
    size = f"{world.size} rank{'s' if world.size > 1 else ''} ({world.device.type})"
    return Plan(
        title=title(step.loss_fn),
        layout=f"{strategy}: {size}{f', {axes}' if axes else ''}",
        rows=tuple(rows),
        notes=tuple(notes),
        digests=(
            *((name, digest(fn)) for name, fn in functions),
            *(() if config is None else ((by, config),)),
        ),
        runtime=config,
    )


def _optimizer_rows(optimizer: object, frozen: tuple[Any, ...], by: str) -> list[Row]:
    if optimizer is None:
        return [Row("UPDATE", "none", "inference only: this train step can't be called")]
    named: Any = optimizer if isinstance(optimizer, dict) else {"": optimizer}
    rows = [
        Row("UPDATE", f"{key}: {description.name}" if key else description.name, description.describe(), by)
        for key, description in named.items()
    ]
    if frozen:
        texts = [each if isinstance(each, str) else plan_text(each) for each in frozen]
        rows.append(Row("UPDATE", "frozen", ", ".join(texts)))
    return rows


def compare(plan: Plan, seed: int, gather_objects: Callable[[Any], list[Any]]) -> None:
    """Raise on every rank if ranks hold different plans or seeds.

    Raises:
        PlanMismatchError: with the first lines that differ and their ranks.
    """
    hashes, seeds = zip(*gather_objects((plan.hash, seed)), strict=True)
    if len(set(seeds)) > 1:
        raise PlanMismatchError(
            f"ranks were given different seeds: {list(seeds)}",
            where="train_step.init(seed=...)",
            fix="give the same seed on every rank: seeds that must differ between ranks are folded from it",
        )
    if len(set(hashes)) == 1:
        return
    texts = gather_objects([*str(plan).splitlines(), *(f"{name} {d}" for name, d in plan.digests)])
    base = texts[0]
    for rank, lines in enumerate(texts):
        differing = [(a, b) for a, b in zip(base, lines, strict=False) if a != b]
        if differing or len(base) != len(lines):
            a, b = differing[0] if differing else (f"{len(base)} lines", f"{len(lines)} lines")
            raise PlanMismatchError(
                f"ranks hold different plans: rank 0 has {a.strip()!r}, rank {rank} has {b.strip()!r}",
                where="train_step.init",
                fix="build the step with the same calls and values on every rank",
            )
