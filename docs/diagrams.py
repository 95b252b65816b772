"""The diagrams of docs/concepts.md: `python docs/diagrams.py` writes them to docs/images, or to a folder that it is given.

Each is drawn from values of real calls: the plan and the mesh of a train step on a simulated world, the micro-batches that two
ranks see, and the states that raise StaleStateError. `tests/docs/test_diagrams.py` compares the files with what this script draws.
"""

from __future__ import annotations

import html
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa

IMAGES = Path(__file__).parent / "images"
INK, PALE, LINE = "#1f2430", "#f4f5f9", "#9aa1b5"
COLOURS = ("#c5d5f7", "#f7d9b5", "#c9ead0", "#ecc8e2")
TITLES = {"FORWARD": "forward", "BACKWARD": "backward", "GRADS": "gradients", "UPDATE": "update"}


@attrs.define
class Drawing:
    """Shapes of an SVG picture with a white ground, so that it reads on a dark page as well."""

    width: int
    height: int
    title: str
    shapes: list[str] = attrs.field(factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = PALE, line: str = LINE
    ) -> None:
        """A rectangle with round corners."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" stroke="{line}"/>'
        )

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", bold: bool = False
    ) -> None:
        """A line of text, whose base line is at y."""
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>{html.escape(words)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """An arrow between two points."""
        self.shapes.append(
            f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{INK}" fill="none" marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'font-family="system-ui, sans-serif" fill="{INK}" role="img">\n<title>{html.escape(self.title)}</title>\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self.shapes) + "\n</svg>\n"


# -- a step becomes operations on a mesh -----------------------------------------------------------------------


def mean_loss(model: nn.Module, batch: torch.Tensor) -> fa.Mean:
    """A loss for the first drawing, which no rank calls."""
    return fa.Mean(model(batch).sum(), weight=len(batch))


def step_to_mesh() -> str:
    """The transforms of a step, the operations of its plan, the strategy, and the ranks of its mesh."""
    calls = (fa.with_precision("bf16"), fa.accumulate(2), fa.clip_norm(1.0))
    written = ('with_precision("bf16")', "accumulate(2)", "clip_norm(1.0)")
    step = fa.chain(*calls)(mean_loss)
    with fa.simulate(ranks=8, per_machine=8):
        model = fa.distribute(lambda: nn.Linear(1, 1), fa.ddp(2) * fa.fsdp(4))
        train_step = fa.train_step(step, model=model, optimizer=fa.adamw(1e-3))
        operations = [line.split()[:2] for line in str(train_step.plan).splitlines()[2:]]
        degrees = train_step.mesh.degrees
    drawing = Drawing(760, 250, "A step, the operations of its plan, and the ranks of its mesh")
    columns = ((15, "a step is data"), (205, "its plan"), (425, "a strategy is a product"))
    for x, title in columns:
        drawing.text(x, 28, title, bold=True)
    for row, words in enumerate(("loss_fn", *written)):
        drawing.box(15, 45 + 40 * row, 165, 30, COLOURS[0] if row else PALE)
        drawing.text(25, 65 + 40 * row, words)
    assert [record.name for record in step.transforms] == [words.partition("(")[0] for words in written]
    for row, (phase, name) in enumerate(operations):
        drawing.box(205, 45 + 40 * row, 190, 30, COLOURS[1])
        drawing.text(215, 65 + 40 * row, TITLES[phase], size=11)
        drawing.text(285, 65 + 40 * row, name)
    drawing.arrow(182, 130, 203, 130)
    drawing.arrow(397, 130, 423, 130)
    drawing.text(425, 65, str(fa.ddp(2) * fa.fsdp(4)))
    replicas, shards = degrees["dp_replicate"], degrees["dp_shard"]
    for rank in range(replicas * shards):
        row, column = divmod(rank, shards)
        drawing.box(425 + 80 * column, 85 + 60 * row, 70, 50, COLOURS[2 + row])
        drawing.text(460 + 80 * column, 106 + 60 * row, f"rank {rank}", anchor="middle")
        drawing.text(
            460 + 80 * column, 124 + 60 * row, f"shard {column + 1} of {shards}", size=11, anchor="middle"
        )
    drawing.text(425, 225, f"{replicas} replicas, each cut over {shards} ranks", size=12)
    return drawing.svg()


# -- a loss is a total and its weight --------------------------------------------------------------------------

LABELS = (3, 1, 4, 2, 4, 1, 3, 2, 4, 1)
"""How many labels each of ten rows has."""


@attrs.frozen
class MicroBatch:
    """What a rank sees in one call of the loss function."""

    rows: list[int]
    total: float
    weight: int


def labels() -> torch.Tensor:
    """Ten rows of up to four labels 0, 1, 2. Places without a label are -1."""
    rows = torch.full((len(LABELS), 4), -1.0)
    for row, count in enumerate(LABELS):
        rows[row, :count] = torch.arange(1, count + 1) % 3
    return rows


def zero_layer() -> nn.Module:
    """A layer that answers 0, so that totals are whole numbers."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def watched_update() -> tuple[list[MicroBatch], float]:
    """The micro-batches of this rank in one update, and the loss of the update."""
    calls: list[MicroBatch] = []

    def loss_fn(model: nn.Module, batch: Any, *, info: fa.LossInfo) -> fa.Mean:
        (wanted,) = batch
        counted = wanted >= 0
        total = ((model(wanted[..., None])[..., 0] - wanted).square() * counted).sum()
        calls.append(MicroBatch(info.rows.tolist(), float(total.detach()), int(counted.sum())))
        return fa.Mean(total, weight=counted.sum())

    with fa.start():
        model = fa.distribute(zero_layer, "ddp")
        train_step = fa.train_step(fa.accumulate(loss_fn, 2), model=model, optimizer=fa.sgd(0.1))
        state = train_step.init(seed=0)
        calls.clear()
        loader = DataLoader(TensorDataset(labels()), batch_size=len(LABELS))
        for _, metrics in fa.scan(train_step, state, fa.shard(loader), steps=1):
            return calls, float(metrics["loss"])
    raise AssertionError


def weights() -> str:
    """One global batch of rows with different numbers of labels, on two ranks with two micro-batches each."""
    ranks = fa.debug_launch(watched_update, (), processes=2)
    drawing = Drawing(760, 300, "One batch on two ranks: each micro-batch has a total and a weight")
    drawing.text(15, 28, "one batch: ten rows, a square for each label", bold=True)
    height = 22
    for rank, (calls, _) in enumerate(ranks):
        for number, call in enumerate(calls):
            colour = COLOURS[2 * rank + number]
            top = 45 + height * call.rows[0]
            for row in call.rows:
                drawing.text(40, 60 + height * row, f"row {row}", size=11, anchor="end")
                for place in range(LABELS[row]):
                    drawing.box(50 + 24 * place, 46 + height * row, 18, 18, colour)
            middle = top + height * len(call.rows) / 2
            drawing.arrow(155, middle, 190, middle)
            drawing.box(195, middle - 20, 310, 40, colour)
            drawing.text(205, middle - 4, f"rank {rank}, micro-batch {number}", size=12)
            drawing.text(205, middle + 13, f"fa.Mean(total={call.total:g}, weight={call.weight})", size=12)
            drawing.arrow(510, middle, 540, 155)
    everything = [call for calls, _ in ranks for call in calls]
    total, weight = sum(call.total for call in everything), sum(call.weight for call in everything)
    loss = {round(found, 4) for _, found in ranks}
    assert loss == {round(total / weight, 4)}
    drawing.text(550, 130, "the loss on both ranks:", bold=True)
    drawing.text(550, 152, " + ".join(f"{call.total:g}" for call in everything) + f" = {total:g}")
    drawing.text(550, 172, " + ".join(f"{call.weight}" for call in everything) + f" = {weight}")
    drawing.text(550, 194, f"{total:g} / {weight} = {loss.pop():g}")
    return drawing.svg()


# -- the life of a state ---------------------------------------------------------------------------------------


def is_live(state: Any) -> bool:
    """Whether a state can be read."""
    try:
        return bool(state.params)
    except fa.errors.StaleStateError:
        return False


def lives() -> tuple[list[str], dict[str, list[str]]]:
    """The calls, and for each state the column in which it is live or donated after the call."""
    batch = torch.ones(4, 1)
    states: dict[str, Any] = {}
    columns: list[str] = []
    marks: dict[str, list[str]] = {}

    def after(call: str) -> None:
        columns.append(call)
        for name, state in states.items():
            row = marks.setdefault(name, ["none"] * (len(columns) - 1))
            row.append("live" if is_live(state) else "donated")

    with fa.start(), tempfile.TemporaryDirectory() as folder:
        model = fa.distribute(lambda: nn.Linear(1, 1), "local")
        train_step = fa.train_step(mean_loss, model=model, optimizer=fa.sgd(0.1))
        actions: list[tuple[str, str, Callable[[], Any]]] = [
            ("init", "state 0", lambda: train_step.init(seed=0)),
            ("snapshot", "copy of 0", lambda: fa.snapshot(states["state 0"])),
            ("train_step", "state 1", lambda: train_step(states["state 0"], batch)[0]),
            ("save", "", lambda: fa.save(folder, states["state 1"])),
            ("train_step", "state 2", lambda: train_step(states["state 1"], batch)[0]),
            ("adopt(copy)", "back at 0", lambda: train_step.adopt(states["copy of 0"])),
            ("restore", "as saved: 1", lambda: fa.restore(folder, like=states["back at 0"])),
        ]
        for call, name, action in actions:
            result = action()
            if name:
                states[name] = result
            after(call)
        assert states["as saved: 1"].step == 1
    return columns, marks


def state_life() -> str:
    """Which states can be read after each of seven calls."""
    columns, marks = lives()
    drawing = Drawing(760, 300, "States that can be read after each call, and states that were donated")
    drawing.text(15, 28, "after the call", bold=True)
    for column, call in enumerate(columns):
        drawing.text(163 + 88 * column, 28, call, size=12, anchor="middle")
    for row, (name, line) in enumerate(marks.items()):
        drawing.text(15, 63 + 38 * row, name)
        for column, mark in enumerate(line):
            if mark == "none":
                continue
            x, y = 123 + 88 * column, 44 + 38 * row
            drawing.box(x, y, 80, 28, COLOURS[2] if mark == "live" else "#ffffff")
            drawing.text(x + 40, y + 18, mark, size=12, anchor="middle")
    drawing.text(
        15, 285, "live: it can be read, saved and trained. donated: each use raises StaleStateError.", size=12
    )
    return drawing.svg()


def drawings() -> dict[str, str]:
    """The text of each file."""
    return {"step_to_mesh.svg": step_to_mesh(), "weights.svg": weights(), "state_life.svg": state_life()}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    for name, text in drawings().items():
        (folder / name).write_text(text)
