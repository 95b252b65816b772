"""Schedules: which rank runs which forward and backward, in which order. A schedule is data.

`table[rank]` lists actions `(kind, stage, micro_batch)`: "F" is a forward, "B" a backward. A backward in two
parts is "I", the gradients of the stage's inputs, and "W", those of its weights. Stages are numbered along
the model, and lie on the rank whose list names them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import attrs

from fnaccel.extend import ArgumentError, function_of, nearest

Action = tuple[str, int, int]
Table = Sequence[Sequence[Action]]
Schedule = Callable[[int, int, int], Table]
"""`schedule(ranks, virtual, micro_batches) -> table`."""

_WHERE = "fa.pipeline(schedule=)"
_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""The time of an action: a backward computes two products for each one of a forward."""
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the inputs",
    "W": "gradient of the weights",
}
_MARKS = {"B": "[{}]", "I": "[{}]", "W": "({})"}
_BACKWARD = {"B": "B", "I": "B"}
"""Actions after which the stage before can go on."""


def gpipe(stages: int, virtual: int, micro_batches: int) -> Table:
    """All forwards, then all backwards (Huang et al. 2019, https://arxiv.org/abs/1811.06965).

    Rank r of p has the stages r, p + r, 2p + r, ...
    """
    return [
        [("F", stages * chunk + rank, i) for chunk in range(virtual) for i in range(micro_batches)]
        + [
            ("B", stages * chunk + rank, i)
            for chunk in reversed(range(virtual))
            for i in range(micro_batches)
        ]
        for rank in range(stages)
    ]


def one_f_one_b(stages: int, virtual: int, micro_batches: int) -> Table:  # noqa: ARG001 - a schedule's arguments
    """A backward after each forward, as soon as one can begin (Narayanan et al. 2019).

    A rank holds the activations of at most `stages - rank` micro-batches.
    https://arxiv.org/abs/1806.03377
    """
    return [
        _alternating(
            [("F", rank, i) for i in range(micro_batches)],
            [("B", rank, i) for i in range(micro_batches)],
            stages - 1 - rank,
        )
        for rank in range(stages)
    ]


def interleaved(stages: int, virtual: int, micro_batches: int) -> Table:
    """1F1B with several stages on each rank, in rounds of micro-batches (Narayanan et al. 2021).

    A round has as many micro-batches as there are ranks, or some more: see `round_size`. If no size divides
    them, the last round is shorter, and all forwards run before the first backward.
    https://arxiv.org/abs/2104.04473
    """
    size = round_size(stages, micro_batches)
    step = size or stages
    rounds = [range(first, min(first + step, micro_batches)) for first in range(0, micro_batches, step)]
    table: list[list[Action]] = []
    for rank in range(stages):
        own = [stages * chunk + rank for chunk in range(virtual)]
        forwards = [("F", stage, i) for each in rounds for stage in own for i in each]
        backwards = [("B", stage, i) for each in rounds for stage in reversed(own) for i in each]
        ahead = 2 * (stages - rank - 1) + (virtual - 1) * size if size else len(forwards)
        table.append(_alternating(forwards, backwards, ahead))
    return table


def round_size(stages: int, micro_batches: int) -> int:
    """The micro-batches of a round, from the number of ranks on. 0 if no number of rounds divides them."""
    rounds = max(1, micro_batches // stages)
    return 0 if micro_batches % rounds else micro_batches // rounds


def zero_bubble(stages: int, virtual: int, micro_batches: int) -> Table:  # noqa: ARG001 - a schedule's arguments
    """ZB-V: gradients of weights fill the time in which ranks would wait (Qi et al. 2023, section 6).

    Rank r of p has the stages r and 2p - 1 - r, so that the first rank has the loss. Ranks never wait between
    the first and the last stages of a batch if a forward and each part of a backward take the same time, and
    there are 2p - 1 micro-batches or more. https://arxiv.org/abs/2401.10241
    """
    # the order is that of at least 2p - 1 micro-batches, without those that are too many
    n = max(2 * stages - 1, micro_batches)
    orders = [_down_and_up(rank, stages, n) for rank in range(stages)]
    return [[action for action in actions if action[2] < micro_batches] for actions in orders]


def _down_and_up(rank: int, stages: int, n: int) -> list[Action]:
    """The actions of a rank under ZB-V, for the stages `down` and `up` of the V."""
    down, up = rank, 2 * stages - 1 - rank
    done: Counter[tuple[str, int]] = Counter()
    actions: list[Action] = []

    def run(kinds: str, *on: int) -> None:
        for kind, stage in zip(kinds, on, strict=True):
            actions.append((kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    for _ in range(2 * (stages - rank) - 1):
        run("F", down)
    for _ in range(rank):
        run("FF", up, down)
    for _ in range(stages - rank):
        run("FIW", up, up, up)
    while done["F", up] < n:
        if done["F", down] < n:
            run("F", down)
        run("IWFIW", down, down, up, up, up)
    for _ in range(rank):
        run("II", down, up)
    for _ in range(stages - rank):
        run("IW", down, down)
    for stage in (up, down):
        while done["W", stage] < n:
            run("W", stage)
    return actions


def _alternating(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Some forwards ahead, then a forward and a backward by turns, then the backwards that are left."""
    actions, waiting = forwards[:ahead], iter(backwards)
    for forward in forwards[ahead:]:
        actions += [forward, next(waiting)]
    return [*actions, *waiting]


READY: dict[str, Schedule] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}


def schedule_of(name: str) -> Schedule:
    """The schedule of a name, or of `"module:function"`.

    Raises:
        ArgumentError: there is none.
    """
    if name in READY:
        return READY[name]
    if ":" not in name:
        raise ArgumentError(f"no schedule is called {name!r}", where=_WHERE, fix=nearest(name, READY))
    return function_of(name, _WHERE)


def places(schedule: Schedule, ranks: int, virtual: int) -> tuple[int, ...]:
    """By stage, the rank whose list of a schedule names it."""
    return _places(schedule(ranks, virtual, 1))


def _places(table: Table) -> tuple[int, ...]:
    homes = {stage: rank for rank, actions in enumerate(table) for _, stage, _ in actions}
    return tuple(homes[stage] for stage in sorted(homes))


def splits_backwards(schedule: Schedule, ranks: int, virtual: int) -> bool:
    """Whether a schedule has backwards in two parts."""
    return any(kind == "I" for actions in schedule(ranks, virtual, 1) for kind, *_ in actions)


@attrs.frozen
class Timing:
    """A schedule in time, if a forward of a stage takes 1 and its backward 2, and messages take none.

    Attributes:
        rows: by rank, `(begin, end, action)`.
        length: when the last action ends.
    """

    rows: tuple[tuple[tuple[int, int, Action], ...], ...]
    length: int

    @property
    def idle(self) -> float:
        """The share of the time of all ranks in which they wait."""
        busy = sum(end - begin for row in self.rows for begin, end, _ in row)
        return 1 - busy / (self.length * len(self.rows)) if self.length else 0.0

    @property
    def most_held(self) -> list[int]:
        """By rank, the largest number of forwards whose backward has not run."""
        held: list[int] = []
        for row in self.rows:
            now = most = 0
            for *_, (kind, _, _) in row:
                now += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
                most = max(most, now)
            held.append(most)
        return held

    def picture(self) -> str:
        """The schedule as text: a line for each rank, with the micro-batch of each action in its place.

        Backwards and gradients of inputs are in brackets, gradients of weights in parentheses, and a dot is a
        unit in which the rank waits.
        """
        width = max((len(f"[{i}]") for row in self.rows for *_, (_, _, i) in row), default=1)
        lines: list[str] = []
        for number, row in enumerate(self.rows):
            cells = ["."] * self.length
            for begin, end, (kind, _, i) in row:
                cells[begin:end] = [_MARKS.get(kind, "{}").format(i)] * (end - begin)
            lines.append(f"rank {number}  " + "".join(f"{cell:>{width}} " for cell in cells).rstrip())
        return "\n".join(lines)


def timed(table: Table, stages: int, micro_batches: int, name: str) -> Timing:
    """The timing of a schedule, which is complete, in order, and ends.

    Args:
        table: the schedule.
        stages: of all ranks.
        micro_batches: their number.
        name: of the schedule, for messages.

    Raises:
        ArgumentError: an action is missing, stands twice, or comes before one that it needs; or ranks would
            wait for each other without end.
    """
    _check_complete(table, stages, micro_batches, name)
    # an action ends under its kind, and both kinds of gradients of inputs under that of a backward
    ends: dict[Action, int] = {}
    rows: list[list[tuple[int, int, Action]]] = [[] for _ in table]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(table):
            row = rows[rank]
            while len(row) < len(actions):
                action = actions[len(row)]
                kind, stage, i = action
                needed = list(_needs(action, stages))
                if any(need not in ends for need in needed):
                    break
                begin = max([row[-1][1] if row else 0, *(ends[need] for need in needed)])
                row.append((begin, begin + _UNITS[kind], action))
                ends[_BACKWARD.get(kind, kind), stage, i] = row[-1][1]
                moved = True
    stuck = {
        rank: actions[len(rows[rank])] for rank, actions in enumerate(table) if len(rows[rank]) < len(actions)
    }
    if stuck:
        waits = "; ".join(f"rank {rank} at {_text(action)}" for rank, action in stuck.items())
        raise _unfit(name, f"does not end: {waits}", "let each action stand after those that it needs")
    return Timing(tuple(map(tuple, rows)), max(ends.values(), default=0))


def _needs(action: Action, stages: int) -> Iterator[Action]:
    kind, stage, i = action
    if kind == "F":
        if stage:
            yield "F", stage - 1, i
        return
    if kind == "W":
        yield "B", stage, i
        return
    yield "F", stage, i
    if stage < stages - 1:
        yield "B", stage + 1, i


def check_places(table: Table, homes: Sequence[int], name: str) -> None:
    """Raise ArgumentError unless each action of a schedule stands where its stage lies."""
    for rank, actions in enumerate(table):
        for _, stage, _ in actions:
            if homes[stage] != rank:
                what = f"runs stage {stage} on rank {rank}, and rank {homes[stage]} has its layers"
                raise _unfit(name, what, "list each stage on one rank, whatever the number of micro-batches")


def check_same(tables: Sequence[Table], name: str) -> None:
    """Raise ArgumentError unless all ranks have the same schedule."""
    for rank, table in enumerate(tables):
        if table != tables[0]:
            what = f"has other lists on rank {rank} of the stages than on rank 0"
            raise _unfit(name, what, "let the function depend on nothing but its arguments")


def _check_complete(table: Table, stages: int, micro_batches: int, name: str) -> None:
    listed = [action for actions in table for action in actions]
    pairs = {(stage, i) for stage in range(stages) for i in range(micro_batches)}
    for action in listed:
        if action[0] not in _UNITS or action[1:] not in pairs:
            raise _unfit(name, f"lists {action!r}", 'an action is ("F", "B", "I" or "W", stage, micro_batch)')
    split = {action[1:] for action in listed if action[0] in ("I", "W")}
    wanted = {("F", *pair) for pair in pairs} | {("B", *pair) for pair in pairs - split}
    wanted |= {(kind, *pair) for kind in ("I", "W") for pair in split}
    once = 'list each forward once, and each backward once or as "I" and "W"'
    if missing := wanted - set(listed):
        raise _unfit(name, f"leaves out {_text(min(missing))}", once)
    if len(listed) > len(wanted):
        twice = next(action for action in listed if listed.count(action) > 1 or action not in wanted)
        raise _unfit(name, f"lists {_text(twice)} twice", once)
    check_places(table, _places(table), name)


def _text(action: Action) -> str:
    kind, stage, i = action
    return f"the {_NAMES[kind]} of micro-batch {i} on stage {stage}"


def _unfit(name: str, what: str, fix: str) -> ArgumentError:
    return ArgumentError(f"the schedule {name!r} {what}", where=_WHERE, fix=fix)
