"""The plan of a train step: validated, ordered, printable, comparable before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from types import CodeType
from typing import Any

import attrs
import torch

from fnaccel.errors import CapabilityError, PlanMismatchError, RepeatedTransformError
from fnaccel.optim.description import Optimizer
from fnaccel.step.foresight import Foresees, Prospect
from fnaccel.step.precision_policy import Precision
from fnaccel.step.step import Capability, Phase, Step, Transform
from fnaccel.strategies.ddp import Ddp
from fnaccel.strategies.distribute import Distributed
from fnaccel.strategies.runtime import Delegation
from fnaccel.strategies.strategy import Strategy
from fnaccel.transforms.compilation import Compile
from fnaccel.transforms.skipping import SkipNonfinite
from fnaccel.transforms.weighting import Weigh
from fnaccel.world.mesh import Mesh


@attrs.frozen
class Row:
    """One line of a plan: when, what, how, and who carries it out."""

    phase: str
    what: str
    detail: str
    by: str = "fnaccel"


@attrs.frozen
class Plan:
    """What a train step will do, in order. `str(plan)` is meant to be read."""

    title: str
    layout: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    digests: tuple[tuple[str, str], ...]
    """(what, digest) of each function, so that ranks running different code are told apart."""
    runtime: str | None = None
    """The configuration of the runtime behind the strategy, as JSON; None without one."""

    @property
    def deepspeed(self) -> dict[str, Any]:
        """DeepSpeed's configuration, complete; a copy.

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

    @property
    def hash(self) -> str:
        """64 hex digits, equal on ranks that run the same plan."""
        text = "\n".join([str(self), *(f"{what} {digest}" for what, digest in self.digests)])
        return hashlib.sha256(text.encode()).hexdigest()


def order(step: Step) -> tuple[Transform, ...]:
    """The transforms by phase; written order within a phase.

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
    # blocks are compiled after whatever else changes modules: torch.compile sees what will run
    return tuple(sorted(step.transforms, key=lambda t: (t.phase, isinstance(t.apply, Compile))))


def title(fn: Any) -> str:
    """`module:qualname` of a function."""
    return f"{getattr(fn, '__module__', '?')}:{getattr(fn, '__qualname__', type(fn).__qualname__)}"


def digest(fn: Any) -> str:
    """A digest of a function's bytecode, constants, names and simple closure values."""
    found = hashlib.sha256(title(fn).encode())

    def feed(code: CodeType) -> None:
        found.update(code.co_code)
        found.update(repr(code.co_names).encode())
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                feed(constant)
            elif isinstance(constant, int | float | str | bytes | bool | type(None) | tuple):
                found.update(repr(constant).encode())

    code = getattr(fn, "__code__", None)
    if code is not None:
        feed(code)
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
        if isinstance(value, int | float | str | bool):
            found.update(repr(value).encode())
    return found.hexdigest()[:16]


def make_plan(
    step: Step,
    distributed: Distributed,
    optimizer: Any,
    mesh: Mesh,
    frozen: tuple[str, ...],
    notes: list[str],
    delegation: Delegation | None = None,
) -> Plan:
    """Validate a step against a strategy and describe it; what a runtime carries out is marked.

    Raises:
        CapabilityError: a transform asks for what the strategy can't do.
    """
    ordered = order(step)
    strategy = distributed.strategy
    able = strategy.capabilities()
    delegated = frozenset[str]() if delegation is None else delegation.names
    by = "" if delegation is None else delegation.by
    for transform in ordered:
        lacking = frozenset() if transform.name in delegated else transform.needs - able
        if lacking:
            raise CapabilityError(
                f"{transform.name} needs {', '.join(sorted(lacking))}, which {strategy} can't do",
                where=f"step of {title(step.loss_fn)}",
                fix=_way_out(transform, able),
            )
    _check_half_reduction(step, strategy)
    prospect = Prospect(
        step=step,
        model=distributed.model,
        strategy=strategy,
        device=mesh.world.device,
        ranks=mesh.world.size,
        frozen=frozen,
        trains=optimizer is not None,
        runtime=by,
    )
    for transform in ordered:
        if isinstance(transform.apply, Foresees):
            notes = [*notes, *transform.apply.foresee(prospect)]

    def row(t: Transform) -> Row:
        return Row(t.phase.name, t.name, t.describe(), by if t.name in delegated else "fnaccel")

    rows = [row(t) for t in ordered if t.phase < Phase.GRADS]
    weighted = step.find(Weigh) is not None
    rows.append(
        Row(
            "BACKWARD",
            "gradients",
            "d(sum of totals) / (sum of weights), over micro-batches and ranks"
            + ("; divided up front" if weighted else ""),
            by or "fnaccel",
        )
    )
    rows += [row(t) for t in ordered if t.phase == Phase.GRADS]
    rows += _optimizer_rows(optimizer, frozen, by or "fnaccel")
    rows += [row(t) for t in ordered if t.phase > Phase.GRADS]
    config = None if delegation is None else json.dumps(delegation.config, sort_keys=True)
    functions = [
        ("loss", step.loss_fn),
        *((t.name, t.apply) for t in ordered if not attrs.has(type(t.apply))),
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
            *((what, digest(fn)) for what, fn in functions),
            *(() if config is None else ((by, config),)),
        ),
        runtime=config,
    )


def _check_half_reduction(step: Step, strategy: Strategy) -> None:
    """Raise where sums over a batch would be sent in fp16, which ends at 65,504."""
    axis = strategy.find(Ddp)
    hook = "" if axis is None or axis.hook is None else axis.hook.name
    precision: Precision | None = step.find(Precision)
    reduced = precision is not None and precision.reduce is torch.float16
    if (hook.startswith("fp16") or reduced) and step.find(Weigh) is None:
        raise CapabilityError(
            "gradients of a total, not yet divided by its weight, would be sent in fp16 and overflow",
            where=f"strategy {strategy}",
            fix="fa.with_weight(step, weight_fn) divides up front (weight 1 for a mean); or reduce in bf16",
        )


def _optimizer_rows(optimizer: Any, frozen: tuple[str, ...], by: str) -> list[Row]:
    if optimizer is None:
        return [Row("UPDATE", "none", "inference only: this train step can't be called")]
    named = optimizer if isinstance(optimizer, dict) else {"": optimizer}
    rows = [
        Row("UPDATE", f"{key}: {one.name}" if key else one.name, one.describe(), by)
        for key, one in named.items()
    ]
    if frozen:
        rows.append(Row("UPDATE", "frozen", ", ".join(frozen)))
    return rows


def _way_out(transform: Transform, able: frozenset[Capability]) -> str:
    if isinstance(transform.apply, Compile):
        scopes = {
            "block": Capability.COMPILE_BLOCK,
            "loss": Capability.COMPILE_LOSS,
            "step": Capability.COMPILE_STEP,
        }
        possible = [repr(name) for name, need in scopes.items() if need in able]
        return f"fa.compile(step, scope={' or '.join(possible)})" if possible else "remove fa.compile"
    return f"remove {transform.name}, or choose another strategy"


def host_reads(step: Step, optimizer: Any, rates_on_host: bool) -> list[str]:
    """Notes on what a step reads on the host, and what weighs the loss."""
    notes: list[str] = []
    precision: Precision | None = step.find(Precision)
    skips = step.find(SkipNonfinite) is not None or (precision is not None and precision.scaled)
    named = optimizer.values() if isinstance(optimizer, dict) else [optimizer]
    reading = [one.name for one in named if isinstance(one, Optimizer) and skips and not one.elementwise]
    notes.extend(
        f"{name} reads one number on the host each step, to know whether to skip" for name in reading
    )
    if skips and rates_on_host:
        notes.append("the schedule takes no tensors: one host read each step, to know the update")
    return notes


def compare(plan: Plan, seed: int, gather_objects: Callable[[Any], list[Any]]) -> None:
    """Raise on every rank where ranks hold different plans or seeds.

    Raises:
        PlanMismatchError: with the first lines that differ and who has them.
    """
    hashes, seeds = zip(*gather_objects((plan.hash, seed)), strict=True)
    if len(set(seeds)) > 1:
        raise PlanMismatchError(
            f"ranks were given different seeds: {list(seeds)}",
            where="train_step.init(seed=...)",
            fix="give the same seed on every rank; what must differ between ranks is folded from it",
        )
    if len(set(hashes)) == 1:
        return
    texts = gather_objects([*str(plan).splitlines(), *(f"{what} {d}" for what, d in plan.digests)])
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
