"""`fnaccel bench`: time, memory and compile time of each scope of `fa.compile` on your loss function."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, get_args

import attrs
import torch

from fnaccel import errors
from fnaccel.benching.isolated import run_isolated
from fnaccel.benching.table import document, table
from fnaccel.benching.task import EAGER, Answer, Failed, Task
from fnaccel.benching.verdict import Row, judge, recommend, tolerance_of
from fnaccel.cli.printable import printable
from fnaccel.config import Recipe, from_yaml, to_yaml
from fnaccel.errors import ArgumentError, FnaccelError, UnknownNameError, nearest
from fnaccel.launch.accelerators import count_accelerators
from fnaccel.step.precision_policy import check_precision
from fnaccel.strategies import strategy
from fnaccel.transforms.compilation import Scope
from fnaccel.world.mesh import resolve

_PROG = "fnaccel bench"
_DEFAULT = "eager,block,loss,step"
_HELP = """Measure a train step of LOSS in each scope of fa.compile, one fresh process each.

References are `module:name`, the current directory first, or `path/to/file.py:name`."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message, where=self.prog, fix=f"{self.prog} --help shows the options")


def parser() -> argparse.ArgumentParser:
    """The options of `fnaccel bench`."""
    options = _Parser(
        prog=_PROG,
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument(
        "loss", metavar="LOSS", help="a function loss_fn(model, batch), or a step made of one"
    )
    options.add_argument(
        "--model", required=True, metavar="REF", help="a factory (a class, a function) or a module"
    )
    options.add_argument(
        "--batch", required=True, metavar="REF",
        help="of all ranks: a pytree of tensors, a function that returns one, or a DataLoader",
    )  # fmt: skip
    options.add_argument("--config", metavar="FILE", help="a recipe in YAML. The options below go over it")
    options.add_argument("--strategy", help='such as fsdp, or "ddp(2) * fsdp(4)" (default: local)')
    options.add_argument("--precision", help="fp32, bf16 or fp16")
    options.add_argument("--accumulate", type=int, help="micro-batches in an update")
    options.add_argument("--clip-norm", type=float, help="the largest norm of the gradient")
    options.add_argument("--optimizer", metavar="NAME", help="adamw, adam, sgd, adafactor (default: adamw)")
    options.add_argument("--steps", type=int, default=30, help="how many are timed (default: 30)")
    options.add_argument(
        "--scopes", default=_DEFAULT, metavar="LIST",
        help=f"separated by commas. Eager always runs, as the reference (default: {_DEFAULT})",
    )  # fmt: skip
    options.add_argument("-n", "--nproc", type=int, default=1, metavar="RANKS", help="processes (default: 1)")
    options.add_argument("--cpu", action="store_true", help="compute on the CPU, whatever else there is")
    options.add_argument(
        "--cold", action="store_true", help="leave out torch's compile cache, as on a new machine"
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    return options


@attrs.frozen(kw_only=True)
class Options:
    """The options after their check."""

    loss: str
    model: str
    batch: str
    recipe: Recipe
    scopes: tuple[str, ...]
    steps: int
    ranks: int
    cpu: bool
    cold: bool
    json: Path | None

    def task(self, scope: str) -> Task:
        """The task for the processes of one scope."""
        return Task(
            loss=self.loss, model=self.model, batch=self.batch,
            recipe=to_yaml(self.recipe), scope=scope, steps=self.steps,
        )  # fmt: skip


def read(arguments: Sequence[str]) -> Options:
    """Parse and check the options without importing the user's code.

    Raises:
        ArgumentError, ConfigError, UnknownNameError, AxisProductError: a wrong option.

    Example:
        >>> read(["train:loss_fn", "--model", "train:GPT", "--batch", "train:batch"]).scopes
        ('eager', 'block', 'loss', 'step')
    """
    parsed = parser().parse_args(arguments)
    if parsed.steps < 1:
        raise ArgumentError(
            f"{parsed.steps} steps can't be timed", where=f"{_PROG} --steps", fix="1, or more"
        )
    recipe = _recipe(parsed)
    _check_ranks(parsed.nproc, recipe, cpu=parsed.cpu)
    if parsed.json is not None and (parsed.json.is_dir() or not parsed.json.parent.is_dir()):
        raise ArgumentError(
            f"no file can be written as {parsed.json}",
            where=f"{_PROG} --json",
            fix="name a file in a folder that exists",
        )
    return Options(
        loss=parsed.loss,
        model=parsed.model,
        batch=parsed.batch,
        recipe=recipe,
        scopes=_scopes(parsed.scopes),
        steps=parsed.steps,
        ranks=parsed.nproc,
        cpu=parsed.cpu,
        cold=parsed.cold,
        json=parsed.json,
    )


def run(arguments: Sequence[str]) -> int:
    """Measure, then print the table and the recommended scope.

    Returns:
        0, or 1 if no scope could be measured. Eager's error is then printed.

    Raises:
        FnaccelError: the options can't be carried out, and nothing was measured.
    """
    options = read(arguments)
    answers: dict[str, Answer] = {}
    for number, scope in enumerate(options.scopes, 1):
        print(f"{_PROG}: {scope} ({number} of {len(options.scopes)})", file=sys.stderr, flush=True)
        with _ended_in_order(), _environment(cold=options.cold) as environ:
            answer = run_isolated(options.task(scope), ranks=options.ranks, cpu=options.cpu, environ=environ)
        if isinstance(answer, Failed) and answer.setup:
            raise _again(answer)
        answers[scope] = answer
    rows = judge(answers, tolerance_of(options.recipe.precision))
    return _report(options, rows)


def _report(options: Options, rows: Sequence[Row]) -> int:
    verdict = recommend(rows)
    print(_title(options, rows))
    print()
    print(printable(table(rows), keep="\n"))
    print()
    if options.json is not None:
        about = {
            "loss": options.loss, "ranks": options.ranks, "steps": options.steps,
            "recipe": to_yaml(options.recipe), "torch": torch.__version__,
        }  # fmt: skip
        options.json.write_text(json.dumps(about | document(rows, verdict), indent=1) + "\n")
    if verdict.scope is None:
        failed = next(row.failed for row in rows if row.failed is not None)  # eager's, the first
        print(printable(failed.text, keep="\n"), file=sys.stderr)
        return 1
    print(f"recommended: {verdict.scope}, {verdict.why}")
    return 0


def _title(options: Options, rows: Sequence[Row]) -> str:
    recipe = options.recipe
    device = next((row.measured.device for row in rows if row.measured is not None), None)
    ranks = "1 rank" if options.ranks == 1 else f"{options.ranks} ranks"
    parts = [
        f"{recipe.strategy} on {ranks}{f' ({device})' if device else ''}",
        recipe.precision,
        recipe.optimizer.name,
        *([f"accumulate {recipe.accumulate}"] if recipe.accumulate > 1 else []),
        *([f"clip {recipe.clip_norm:g}"] if recipe.clip_norm is not None else []),
        f"{options.steps} steps timed",
    ]
    return f"{options.loss}: {', '.join(parts)}"


def _recipe(parsed: argparse.Namespace) -> Recipe:
    base = Recipe() if parsed.config is None else from_yaml(Path(parsed.config))
    flags = {name: getattr(parsed, name) for name in ("strategy", "precision", "accumulate", "clip_norm")}
    recipe = attrs.evolve(
        base, compile=None, **{name: value for name, value in flags.items() if value is not None}
    )
    if parsed.optimizer is not None:
        recipe = attrs.evolve(recipe, optimizer=attrs.evolve(recipe.optimizer, name=parsed.optimizer))
    check_precision(recipe.precision, f"{_PROG} --precision")
    return recipe


def _check_ranks(ranks: int, recipe: Recipe, *, cpu: bool) -> None:
    if ranks < 1:
        raise ArgumentError(f"{ranks} ranks can't train", where=f"{_PROG} -n", fix="-n 1, or more")
    chosen = strategy(recipe.strategy)
    resolve(chosen.degrees(), ranks, str(chosen))
    accelerators = 0 if cpu else count_accelerators()
    if 0 < accelerators < ranks:
        raise ArgumentError(
            f"{ranks} ranks need an accelerator each, and there are {accelerators}",
            where=f"{_PROG} -n {ranks}",
            fix=f"-n {accelerators}, or --cpu to compute without",
        )


def _scopes(text: str) -> tuple[str, ...]:
    valid = (EAGER, *get_args(Scope))
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in valid:
            raise UnknownNameError(
                f"no scope is called {name!r}", where=f"{_PROG} --scopes", fix=nearest(name, valid)
            )
    return tuple(dict.fromkeys([EAGER, *names]))


@contextmanager
def _environment(*, cold: bool) -> Generator[dict[str, str]]:
    """The environment of the processes of one scope. With `cold` it has an empty compile cache."""
    if not cold:
        yield {**os.environ}
        return
    with tempfile.TemporaryDirectory(prefix="fnaccel-bench-cache-", ignore_cleanup_errors=True) as cache:
        yield os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}


@contextmanager
def _ended_in_order() -> Generator[None]:
    """Let SIGTERM raise as Ctrl-C does, so that child processes end with this process."""

    def stop(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _again(failed: Failed) -> FnaccelError:
    """The error that a child process raised while importing the references."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, FnaccelError):
        return kind(failed.what, where=failed.where, fix=failed.fix)
    return errors.LaunchError(
        failed.what, where=_PROG, fix="read this message, and make the code run by itself in python"
    )
