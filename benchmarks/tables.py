"""Tables in Markdown, made from `benchmarks/results`: `BLOCKS` has one for each name of a marker on a page.

`pages.py` puts them between the markers. Nothing is measured here, and no number is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

Record = dict[str, Any]
EAGER = "eager step, tiny MLP, with loader, clip, schedule"
CAPTURED = "compiled step, small GPT, 1 process, 8 x 64 tokens"
JAX, ON_JAX = "jax.jit and optax", "captured step, GPT of width"
SCRIPTS = {"jax_step": "make bench-jax"}
"""Commands that take the rows again. The others are `python benchmarks/NAME.py`."""


@attrs.frozen
class Results:
    """The rows of one script, and where they were taken."""

    name: str
    environment: dict[str, Any]
    absent: tuple[str, ...]
    rows: list[Record]

    def find(self, what: str, against: str) -> Record | None:
        """The row of this work and this peer, if it has run."""
        rows = (row for row in self.rows if (row["what"], row["against"]) == (what, against))
        return next((row for row in rows if row["ratio"] is not None), None)

    def matching(self, pattern: str) -> list[Record]:
        """The rows whose work matches a pattern."""
        return [row for row in self.rows if re.search(pattern, row["what"])]


Measured = Mapping[str, Results]


def read(folder: Path) -> Measured:
    """All results of a folder, by the name of their script."""
    paths = sorted(path for path in folder.glob("*.json") if path.stem != "quick")
    contents = {path.stem: json.loads(path.read_text()) for path in paths}
    return {
        name: Results(name, content["environment"], tuple(content["absent"]), content["rows"])
        for name, content in contents.items()
    }


# --- cells


def figure(value: float, unit: str) -> str:
    """A measurement to three digits."""
    digits = 0 if unit in ("bytes", "micro-batches") or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def ratio_of(value: float) -> str:
    """A ratio to two digits, as goals are set. Small ones to one digit that is not 0."""
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"


def is_missed(row: Record) -> bool:
    """Whether a row has a goal that its ratio does not reach."""
    return row["goal"] is not None and row["ratio"] is not None and round(row["ratio"], 2) > row["goal"]


def cells(row: Record) -> list[str]:
    """A row as the columns of `HEAD`."""
    goal = "" if row["goal"] is None else f"{row['goal']:.2f}"
    if row["ratio"] is None:
        return [row["what"], row["against"], "", "", f"not run: {row['not_run']}", "", goal]
    ratio = ratio_of(row["ratio"])
    return [
        row["what"],
        row["against"],
        figure(row["ours"], row["unit"]),
        figure(row["peer"], row["unit"]),
        f"**{ratio}**" if is_missed(row) else ratio,
        "" if row["low"] is None else f"{ratio_of(row['low'])} to {ratio_of(row['high'])}",
        goal,
    ]


HEAD = ["what", "against", "fnaccel", "peer", "ratio", "range", "goal"]


def grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    rule = "|" + "---|" * len(head)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


def rows_table(rows: Sequence[Record]) -> str:
    """Rows in full. The work and its own time stand in the first row of several."""
    lines: list[list[str]] = []
    before: tuple[str, str] | None = None
    for row in rows:
        line = cells(row)
        measured = line[0], line[2]
        if measured == before:
            line[0] = line[2] = ""
        before = measured
        lines.append(line)
    return grid(HEAD, lines)


# --- what stands under a table


def legend(rows: Sequence[Record]) -> str:
    """What the columns of rows in full mean."""
    notes = ["Ratio: fnaccel / peer, below 1 is less."]
    if any(row["low"] is not None for row in rows):
        notes.append(
            "Range: the middle half of the ratios of single rounds (all, if there are two or three)."
        )
    if any(map(is_missed, rows)):
        notes.append("Bold: the goal is missed.")
    return " ".join(notes)


def caption(results: Sequence[Results], columns: str) -> str:
    """The meaning of the columns. Then for each place the date, commit, processor, versions and commands."""
    places: dict[str, list[str]] = {}
    for found in results:
        places.setdefault(_place(found.environment), []).append(f"`{_command(found.name)}`")
    lines = [f"{place} Reproduce: {', '.join(commands)}." for place, commands in places.items()]
    absent = sorted({peer for found in results for peer in found.absent})
    if absent:
        columns += f" Not installed, left out: {', '.join(absent)}."
    return f"<sub>{' '.join([columns, *lines])}</sub>"


NAMED = ("python", "torch", "accelerate", "lightning-fabric", "transformers", "jax", "optax")
"""The packages whose versions stand under a table. The results have more."""


def _place(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {version}" for name, version in environment["versions"].items() if name in NAMED
    )
    device = f"{environment['accelerator']}, " if "accelerator" in environment else ""
    return (
        f"{environment['date']}, commit {environment['commit']}: {device}{environment['cpu']}, "
        f"{environment['cores']} cores, {environment['threads_per_process']} thread a process, {versions}."
    )


def _command(name: str) -> str:
    return SCRIPTS.get(name, f"python benchmarks/{name}.py")


# --- blocks


def _full(source: str, pattern: str) -> Callable[[Measured], str]:
    """The rows of one script whose work matches a pattern."""

    def make(measured: Measured) -> str:
        if source not in measured:
            return f"Not measured yet: `{_command(source)}`."
        results = measured[source]
        rows = results.matching(pattern)
        return f"{rows_table(rows)}\n\n{caption([results], legend(rows))}"

    return make


def growth(measured: Measured) -> str:
    """The cost of each further piece, from every script that sweeps a size."""
    results = [found for found in measured.values() if found.matching("slope")]
    rows = [row for found in results for row in found.matching("slope")]
    return f"{rows_table(rows)}\n\n{caption(results, legend(rows))}"


def jax_step(measured: Measured) -> str:
    """Steps per second and first losses at each width."""
    if "jax_step" not in measured:
        return f"Not measured yet: `{_command('jax_step')}`."
    results = measured["jax_step"]
    lines = []
    for step in results.matching("tokens$"):
        width = step["what"].removeprefix(ON_JAX).partition(",")[0]
        starts = [results.find(f"{ON_JAX}{width}: first loss, {kind}", JAX) for kind in ("cold", "warm")]
        seconds = [figure(start[key], "s") if start else "" for start in starts for key in ("ours", "peer")]
        rates = [f"{1000 / step[key]:,.0f}" for key in ("ours", "peer")]
        lines.append([width.strip(), *rates, *cells(step)[4:6], *seconds])
    head = ["GPT of width", "steps/s, fnaccel", "JAX", "ratio", "range", "cold, fnaccel", "JAX"]
    head += ["warm, fnaccel", "JAX"]
    note = f"Cold, warm: time to the first loss. {legend(results.rows)}"
    return f"{grid(head, lines)}\n\n{caption([results], note)}"


CHOSEN = (
    ("step_overhead", f"^{EAGER}$", ""),
    ("step_overhead", "^2 ranks", "by hand$"),
    ("compiled", f"^{CAPTURED}$", ""),
    ("compiled", "^2 ranks", "compiled"),
    ("jax_step", "tokens$|first loss, cold$", ""),
    ("gpt2", "", "by hand|^Accelerate"),
    ("head", "(time|memory)$", "F.cross_entropy"),
    ("compiled", "^8 layers: first loss", "by hand"),
    ("starting", "^8 layers.*(step 1|over)$", ""),
    ("collectives", "^(gather|reduce): 16 leaves.*MiB", "^Accelerate|^Lightning"),
    ("checkpoint", r"^(save|restore), \d+ MiB$", "^Accelerate"),
    ("load", "^load .* of safetensors .* stored", ""),
    ("offload", "^forward, 1 token, warm .* 12 layers", ""),
    ("starting", "^(import|launch)", "torch$|^import accelerate|^torchrun$"),
)
"""Script, work and peers of the rows for a reader who chooses a library. fnaccel is worse in some."""


def choice(measured: Measured) -> str:
    """Rows of all scripts for a reader who chooses a library."""
    chosen = [row for row in CHOSEN if row[0] in measured]
    rows = [
        row
        for source, work, peer in chosen
        for row in measured[source].matching(work)
        if re.search(peer, row["against"]) and not row["against"].startswith("fnaccel")
    ]
    results = [measured[source] for source in dict.fromkeys(source for source, _, _ in chosen)]
    return f"{rows_table(rows)}\n\n{caption(results, legend(rows))}"


PEERS = ("by hand", "by hand, fused AdamW", "Accelerate", "Lightning Fabric", "JAX")


@attrs.frozen
class Line:
    """A line of the README's table: a source, its work, and the name that a column of `PEERS` has there."""

    label: str
    source: str
    what: str
    peers: dict[str, str]


SCREEN = (
    Line(
        "eager step, MLP of 6 parameter tensors",
        "step_overhead",
        EAGER,
        {
            "by hand": "PyTorch by hand",
            "by hand, fused AdamW": "PyTorch by hand, fused AdamW",
            "Accelerate": "Accelerate",
            "Lightning Fabric": "Lightning Fabric",
        },
    ),
    Line(
        "captured step, GPT of width 64",
        "compiled",
        CAPTURED,
        {
            "by hand": "torch.compile(model) by hand",
            "by hand, fused AdamW": "torch.compile(model) by hand, fused AdamW",
            "Accelerate": "Accelerate + torch.compile(model)",
        },
    ),
    Line("captured step, GPT of width 32", "jax_step", f"{ON_JAX} 32, 8 x 64 tokens", {"JAX": JAX}),
    Line("captured step, GPT of width 128", "jax_step", f"{ON_JAX} 128, 8 x 64 tokens", {"JAX": JAX}),
    Line(
        "first loss, GPT of width 128, nothing cached",
        "jax_step",
        f"{ON_JAX} 128: first loss, cold",
        {"JAX": JAX},
    ),
    Line(
        "first loss, GPT of 8 layers, compiled beside the run",
        "starting",
        "8 layers, background=True, nothing cached: loss of step 1",
        {"by hand, fused AdamW": "by hand, torch.compile(model), fused AdamW"},
    ),
)


def screen_rows(measured: Measured) -> dict[str, dict[str, Record]]:
    """The rows of each line of the README's table that has run, by column."""
    table: dict[str, dict[str, Record]] = {}
    for line in SCREEN:
        for peer, name in line.peers.items():
            row = measured[line.source].find(line.what, name) if line.source in measured else None
            if row is not None:
                table.setdefault(line.label, {})[peer] = row
    return table


def first_screen(measured: Measured) -> str:
    """A small table: the time of fnaccel, and that of each peer with the ratio in brackets."""
    table = screen_rows(measured)
    columns = [peer for peer in PEERS if any(peer in rows for rows in table.values())]
    lines = []
    for label, rows in table.items():
        ours = next(iter(rows.values()))
        lines.append(
            [
                label,
                figure(ours["ours"], ours["unit"]),
                *(_peer_cell(rows[peer]) if peer in rows else "" for peer in columns),
            ]
        )
    return grid(["", "fnaccel", *columns], lines)


def first_screen_caption(measured: Measured) -> str:
    """The machines, versions and commands behind the README's table, for the page of the benchmarks."""
    sources = dict.fromkeys(line.source for line in SCREEN)
    results = [measured[name] for name in sources if name in measured]
    note = (
        "One step, on CPUs. In brackets: fnaccel / peer, below 1 is faster, and its range over rounds if "
        "there is one. fnaccel's AdamW is PyTorch's fused kernel, and the peers' is PyTorch's default."
    )
    return caption(results, note)


def _peer_cell(row: Record) -> str:
    spread = "" if row["low"] is None else f", {ratio_of(row['low'])} to {ratio_of(row['high'])}"
    return f"{figure(row['peer'], row['unit'])} ({ratio_of(row['ratio'])}{spread})"


BLOCKS: dict[str, Callable[[Measured], str]] = {
    "first_screen": first_screen,
    "first_screen_caption": first_screen_caption,
    "choice": choice,
    "growth": growth,
    "step_overhead": _full("step_overhead", r"^(?!step of \d+ |slope)"),
    "compiled": _full("compiled", r"^(?!\d+ layers|slope)"),
    "gpu": _full("gpu", ""),
    "gpt2": _full("gpt2", ""),
    "first_loss": _full("compiled", "first loss"),
    "background": _full("starting", "background"),
    "jax_step": jax_step,
    "collectives": _full("collectives", r"^(?!.*leaves of \[8, 4\]$|.*slope)"),
    "checkpoint": _full("checkpoint", "^(?!.*slope)"),
    "axes": _full("axes", "^(?!slope)"),
    "pipeline": _full("pipeline", ""),
    "replicas": _full("replicas", ""),
    "offload": _full("offload", ""),
    "load": _full("load", ""),
    "seeing": _full("seeing", ""),
    "starting": _full("starting", r"^(?!\d+ layers)"),
    "optimizer_parts": _full("optimizer_parts", ""),
    "gradients": _full("gradients", ""),
    "pure": _full("pure", ""),
    "head": _full("head", ""),
}
