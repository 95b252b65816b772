"""`fnaccel bench`: time and memory of each scope of `fa.compile`, or of strategies, on your loss function."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import attrs
import torch

from fnaccel.cli.benching.answer import EAGER, Answer, Failed, Task, answer_in
from fnaccel.cli.benching.verdict import (
    Row,
    brief,
    document,
    judge,
    recommend,
    recommend_strategy,
    tolerance_of,
)
from fnaccel.cli.options.bench import SCOPES, parser
from fnaccel.cli.subject import fields_of, recipe_of
from fnaccel.cli.terminal import columns, print_json, printable, split_list
from fnaccel.config import Recipe, to_yaml
from fnaccel.errors import UnknownNameError, nearest, require
from fnaccel.launch.accelerators import count_accelerators
from fnaccel.step.choices import Scope
from fnaccel.strategies import strategy
from fnaccel.world.mesh import resolve

_PROG = "fnaccel bench"
_SCOPES = (EAGER, *get_args(Scope))
_WIDEST_NOTE = 80


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options without importing the user's code. `recipe` is added to them.

    Raises:
        ArgumentError, ConfigError, UnknownNameError, AxisProductError: a wrong option.

    Example:
        >>> read(["train:loss_fn", "--model", "train:GPT", "--batch", "train:batch"]).scopes
        ('eager', 'block', 'loss', 'step')
    """
    options = parser().parse_args(arguments)
    steps, ranks = options.steps, options.ranks
    require(steps >= 1, f"{steps} steps can't be timed", f"{_PROG} --steps", "1, or more")
    options.recipe = attrs.evolve(recipe_of(fields_of(options, _PROG), _PROG), compile=None)
    require(ranks >= 1, f"{ranks} ranks can't train", f"{_PROG} -n", "-n 1, or more")
    options.strategies = split_list(options.strategies or "")
    require(
        not (options.strategies and options.strategy),
        "--strategy and --strategies together",
        f"{_PROG} --strategies",
        "one of the two",
    )
    for text in options.strategies or [options.recipe.strategy]:
        chosen = strategy(text)
        resolve(chosen.degrees(), _ranks_of(text, options), str(chosen))
    accelerators = 0 if options.cpu else count_accelerators()
    require(
        not 0 < accelerators < ranks,
        f"{ranks} ranks need an accelerator each, and there are {accelerators}",
        f"{_PROG} -n {ranks}",
        f"-n {accelerators}, or --cpu to compute without",
    )
    names = split_list(SCOPES if options.scopes is None else options.scopes)
    for name in names:
        if name not in _SCOPES:
            raise UnknownNameError(
                f"no scope is called {name!r}", where=f"{_PROG} --scopes", fix=nearest(name, _SCOPES)
            )
    compared = not options.strategies
    options.scopes = (
        tuple(dict.fromkeys([EAGER, *names])) if compared else (names[0] if options.scopes else EAGER,)
    )
    return options


def _ranks_of(text: str, options: argparse.Namespace) -> int:
    """The ranks of a strategy: one for `local`, if it is compared with others."""
    return 1 if options.strategies and not strategy(text).degrees() else options.ranks


def run(arguments: Sequence[str]) -> int:
    """Measure, then print the table and the recommended scope or strategy.

    Returns:
        0, 1 if none could be measured (the first error is then printed), or 2 if a reference is wrong.

    Raises:
        FnaccelError: an option is wrong, and nothing was measured.
    """
    options = read(arguments)
    tasks = _tasks(options)
    answers: dict[str, Answer] = {}
    for number, (name, task) in enumerate(tasks.items(), 1):
        print(f"{_PROG}: {name} ({number} of {len(tasks)})", file=sys.stderr, flush=True)
        ranks = _ranks_of(name, options) if options.strategies else options.ranks
        answers[name] = answer = run_isolated(task, ranks, cpu=options.cpu, cold=options.cold)
        if isinstance(answer, Failed) and answer.setup:
            print(printable(answer.text, keep="\n"), file=sys.stderr)
            return 2
    reference = next(iter(tasks))
    rows = judge(answers, tolerance_of(options.recipe.precision), reference)
    chosen = recommend_strategy(rows) if options.strategies else recommend(rows)
    if options.json:
        about = {"loss": options.loss, "ranks": options.ranks, "steps": options.steps}
        about |= {"recipe": to_yaml(options.recipe), "torch": torch.__version__, "reference": reference}
        print_json(about | document(rows, chosen))
    else:
        kind = "strategy" if options.strategies else "scope"
        print(f"{_title(options, answers)}\n\n{table(rows, kind, reference)}\n")
    if chosen.name is not None:
        if not options.json:
            print(f"recommended: {chosen.name}, {chosen.why}")
        return 0
    failed = next(answer for answer in answers.values() if isinstance(answer, Failed))
    print(printable(failed.text, keep="\n"), file=sys.stderr)
    return 1


def _tasks(options: argparse.Namespace) -> dict[str, Task]:
    """The task of each scope, or of each strategy. The first is the reference."""
    recipe: Recipe = options.recipe
    pairs = [(scope, recipe, scope) for scope in options.scopes]
    if options.strategies:
        scope = options.scopes[0]
        pairs = [(text, attrs.evolve(recipe, strategy=text), scope) for text in options.strategies]
    return {
        name: Task(
            loss=options.loss, model=options.model, batch=options.batch,
            recipe=to_yaml(each), scope=scope, steps=options.steps,
        )
        for name, each, scope in pairs
    }  # fmt: skip


def table(rows: Sequence[Row], kind: str = "scope", reference: str = EAGER) -> str:
    """Rows in columns. A row that failed has the reason in the column `note`."""
    cells = [(kind, "first step s", "ms/step", "steps/s", f"against {reference}", "peak MiB", "note")]
    for row in rows:
        found = row.answer
        note = row.note if len(row.note) <= _WIDEST_NOTE else f"{row.note[: _WIDEST_NOTE - 3]}..."
        if isinstance(found, Failed):
            cells.append((row.name, "-", "-", "-", "-", "-", note))
            continue
        gain = "-" if row.gain is None else f"{row.gain:.2f}x"
        times = brief(found.first), _three_digits(found.seconds * 1e3), _three_digits(1 / found.seconds)
        cells.append((row.name, *times, gain, f"{found.peak:.0f}", note))
    return columns(cells, "<>>>>>")


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def run_isolated(task: Task, ranks: int, *, cpu: bool, cold: bool) -> Answer:
    """Measure one scope in fresh processes, without a GPU if `cpu`. Their output is not printed.

    With `cold` they have an empty compile cache.
    """
    with tempfile.TemporaryDirectory(prefix="fnaccel-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "fnaccel", "launch", "-n", str(ranks), "--timeout-grace", "5"]
        command += [*(["--cpu"] if cpu else []), "-m", "fnaccel.cli.benching.measuring"]
        command += [name, json.dumps(attrs.asdict(task))]
        environ = os.environ | ({"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")} if cold else {})
        with (folder / "output.txt").open("w+", errors="replace") as output:
            code = _run(command, environ, output.fileno())
            output.seek(0)
            text = output.read().strip()
        found = answer_in(folder)
    # a killed rank writes no answer, and its peers only report that it has gone
    if found is not None and not (isinstance(found, Failed) and found.follows and code > 128):
        return found
    what = f"ended with exit code {code}"
    if code > 128 and code - 128 in signal.valid_signals():
        number = signal.Signals(code - 128)
        memory = " (memory ran out, if nobody sent it)" if number == signal.SIGKILL else ""
        what = f"ended by {number.name}{memory}"
    return Failed(kind="", what=what, text=text or what)


def _run(command: Sequence[str], environ: dict[str, str], output: int) -> int:
    """Run a command. If SIGTERM or Ctrl-C ends this process, the command ends first."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environ)
    try:
        return process.wait()
    except BaseException:
        process.terminate()  # the launcher ends its ranks
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _title(options: argparse.Namespace, answers: dict[str, Answer]) -> str:
    recipe: Recipe = options.recipe
    device = next((f" ({found.device})" for found in answers.values() if not isinstance(found, Failed)), "")
    subject = options.scopes[0] if options.strategies else recipe.strategy
    parts = [
        f"{subject} on {'1 rank' if options.ranks == 1 else f'{options.ranks} ranks'}{device}",
        recipe.precision,
        recipe.optimizer.name,
        *([f"accumulate {recipe.accumulate}"] if recipe.accumulate > 1 else []),
        *([f"clip {recipe.clip_norm:g}"] if recipe.clip_norm is not None else []),
        f"{options.steps} steps timed",
    ]
    return f"{options.loss}: {', '.join(parts)}"
