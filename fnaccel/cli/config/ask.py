"""`fnaccel config` asks, and writes a recipe. `fnaccel.config.questions` has the questions."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from fnaccel.cli.config.machine import this_machine
from fnaccel.cli.options import config as options_of
from fnaccel.cli.options.config import DEFAULT_FILE
from fnaccel.cli.terminal import print_json
from fnaccel.config import to_yaml
from fnaccel.config.questions import Machine, Question, next_question, recipe_of
from fnaccel.config.recipes import Recipe
from fnaccel.config.yaml import text_of
from fnaccel.errors import ConfigError, nearest
from fnaccel.world.paths import output_file, replace_file
from fnaccel.world.plain_data import load_yaml

_PROG = "fnaccel config"
Read = Callable[[Question], Any]


def run(arguments: Sequence[str]) -> int:
    """Ask, and write the recipe.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        ConfigError: the file exists, the answers of a file do not fit, or the input has ended.
    """
    options = options_of.ask().parse_args(arguments)
    output: Path = options.output or Path(DEFAULT_FILE)
    output_file(output, f"{_PROG} -o")
    in_terminal = options.answers is None and sys.stdin.isatty() and sys.stdout.isatty()
    if output.exists() and not options.overwrite and not in_terminal:
        raise ConfigError(
            f"there is a file {output} already", where=_PROG, fix="another -o, or --overwrite to replace it"
        )
    machine = this_machine()
    try:
        if options.answers is not None:
            answers = _answers_of(machine, options.answers)
        else:
            has_arrows = in_terminal and importlib.util.find_spec("questionary") is not None
            read = _read_with_arrows if has_arrows else _read_line
            if output.exists() and not options.overwrite and not _may_replace(output, read):
                return _nothing_written()
            answers = answers_by(machine, read)
    except KeyboardInterrupt:
        return _nothing_written()
    recipe = recipe_of(machine, answers)
    replace_file(output, f"{to_yaml(recipe)}\n", f"{_PROG} -o")
    if options.json:
        print_json({"written": str(output), "answers": answers})
    else:
        _show(recipe, output, str(answers["where"]))
    return 0


def answers_by(machine: Machine, read: Read) -> dict[str, Any]:
    """All answers that matter, read one by one. A wrong answer is asked for again.

    Args:
        machine: the facts of this machine.
        read: shows a question, and returns the raw answer.

    Example:
        >>> answers_by(Machine(), lambda question: None)["precision"]
        'fp32'
    """
    answers: dict[str, Any] = {}
    while (question := next_question(machine, answers)) is not None:
        raw = read(question)
        try:
            answers[question.name] = question.parse(raw)
        except ConfigError as error:
            print(f"{error.what}. {error.fix}", file=sys.stderr, flush=True)
    return answers


def _answers_of(machine: Machine, file: Path) -> dict[str, Any]:
    """The answers of a file, with defaults for questions that it does not answer."""
    where = f"{_PROG} --answers"
    try:
        given: Any = load_yaml(text_of(file, where))
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{file} is not YAML: {' '.join(str(error).split())}",
            where=where,
            fix="correct the line it names",
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(
            f"{file} holds a {type(given).__name__}, not answers by name",
            where=where,
            fix="write name: answer",
        )
    answers: dict[str, Any] = {}
    while (question := next_question(machine, answers)) is not None:
        answers[question.name] = question.parse(given.get(question.name))
    for name in given:
        if name not in answers:
            raise ConfigError(
                f"nobody asks for {name} after these answers",
                where=f"{_PROG} --answers {file}",
                fix=f"leave it out, or change an earlier answer ({nearest(name, answers)})",
            )
    return answers


def _read_line(question: Question) -> Any:
    """Ask on a line of text, with numbered choices."""
    print(f"\n{question.text}" + (f"\n  ({question.why})" if question.why else ""))
    for number, (name, meaning) in enumerate(question.choices, 1):
        print(f"  {number}. {name}: {meaning}")
    default = _shown_default(question)
    print(f"[{default}] " if default else "> ", end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise ConfigError(
            f"the input ends before: {question.text}", where=f"answers.{question.name}",
            fix="--answers FILE for scripts",
        )  # fmt: skip
    return line.strip()


def _read_with_arrows(question: Question) -> Any:
    """Ask with questionary."""
    import questionary  # noqa: PLC0415 - an extra, and slow to import

    text = question.text + (f" ({question.why})" if question.why else "")
    if question.kind == "choice":
        choices = [questionary.Choice(f"{name}: {meaning}", name) for name, meaning in question.choices]
        return questionary.select(text, choices=choices, default=question.default).unsafe_ask()
    if question.kind == "yes or no":
        return questionary.confirm(text, default=question.default).unsafe_ask()
    return questionary.text(text, default=_shown_default(question)).unsafe_ask()


def _shown_default(question: Question) -> str:
    if question.kind == "yes or no":
        return "yes" if question.default else "no"
    return "none" if question.kind == "number" and question.default is None else str(question.default)


def _may_replace(output: Path, read: Read) -> bool:
    question = Question(name="replace", text=f"{output} exists. Replace it?", kind="yes or no", default=False)
    return bool(question.parse(read(question)))


def _nothing_written() -> int:
    print("\nnothing was written", file=sys.stderr)
    return 130


def _show(recipe: Recipe, output: Path, where: str) -> None:
    option = "" if output == Path(DEFAULT_FILE) else f"--config {output} "
    place = "On each machine: " if where == "same command" else ""
    print(f"\nwrote {output}:\n\n{to_yaml(recipe)}\n{place}fnaccel launch {option}train.py")
    print(f"What it would start: fnaccel launch {option}--dry-run train.py")
