"""`option`: a field of a record that is an option of `fnaccel launch` too.

`LaunchRecipe` (`launch/recipe.py`) and its sections (`launch/sections.py`) have such fields. From them follow
the parser of the command line, the command line for another machine, the checks before a start, and which
carriers refuse an option. So a new option is a new field, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

import attrs

from fnaccel.errors import LaunchError

Check = Callable[[Any], "tuple[str, str] | None"]
"""From a value to the problem with it and the fix, or to None."""


@attrs.frozen(kw_only=True)
class Option:
    """How a field is written on the command line, and who can use it.

    Attributes:
        flags: such as `-n` and `--nproc`. The first is written on command lines. Errors name the last.
        help: the text of `--help`. Empty: the command line has no such option.
        group: the title of its group in `--help`. Empty: the options without a title.
        metavar: the name of the value in `--help`. None: the flag in capitals.
        repeated: whether the option may be given several times.
        check: what is wrong with a value, if anything is. Asked before a start, unless the value is None.
        refused_by: the carriers that can't carry the option, separated by spaces.
        read: from the value of the command line to fields of the record. None: the field itself.
        write: from the record to the values of the command line. None: the field itself.
    """

    flags: tuple[str, ...]
    help: str
    group: str = ""
    metavar: str | None = None
    repeated: bool = False
    check: Check | None = None
    refused_by: str = ""
    read: Callable[[Any], Mapping[str, Any]] | None = None
    write: Callable[[Any], list[str]] | None = None

    @property
    def name(self) -> str:
        """The option as errors name it."""
        return self.flags[-1]


def option(flags: str, about: str = "", *, default: Any = None, converter: Any = None, **more: Any) -> Any:
    """A field of a record, and how it is written on the command line.

    Args:
        flags: separated by spaces. Without a text for `--help`: the option that an error names.
        about: the text of `--help`.
        default: of the field. A class is called for each record.
        converter: of the field.
        more: further attributes of `Option`.
    """
    entry = Option(flags=tuple(flags.split()) if about else (flags,), help=about, **more)
    start: Any = attrs.Factory(default) if isinstance(default, type) else default
    return attrs.field(default=start, converter=converter, metadata={"option": entry})


def rule(good: Callable[[Any], bool], problem: str, fix: str) -> Check:
    """A check of a value. `{}` in the text of the problem is the value."""
    return lambda value: None if good(value) else (problem.format(value), fix)


def at_least(lowest: float, problem: str, fix: str) -> Check:
    """A check that a value is not too low. `{}` in the text of the problem is the value."""
    return rule(lambda value: value >= lowest, problem, fix)


def flags_of(record: type, prefix: str = "") -> Iterator[tuple[str, Option, type]]:
    """The options of the command line that a record and its sections have.

    Returns:
        For each option its dotted field, the option, and the type of its value on the command line.

    Example:
        >>> next(flags_of(fa.config.LaunchRecipe, "launch."))[::2]
        ('launch.ranks', <class 'int'>)
    """
    hints = get_type_hints(record)
    for field in attrs.fields(record):
        entry, hint = field.metadata.get("option"), hints[field.name]
        if attrs.has(hint):
            yield from flags_of(hint, f"{prefix}{field.name}.")
        elif entry is not None and entry.help:
            kinds = () if entry.read else (hint, *get_args(hint))
            kind = next((kind for kind in (bool, int, float) if kind in kinds), str)
            yield f"{prefix}{field.name}", entry, kind


def default_of(field: Any) -> Any:
    """The default value of a field."""
    return field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # pyright: ignore[reportArgumentType]


def changed_options(record: Any) -> dict[str, Option]:
    """The options of a record that have another value than their default. Its sections are left out."""
    return {
        field.name: field.metadata["option"]
        for field in attrs.fields(type(record))
        if "option" in field.metadata and getattr(record, field.name) != default_of(field)
    }


def words_of(record: Any, but: tuple[str, ...]) -> list[str]:
    """A record as options of a command line: the inverse of the parser. Its sections are left out.

    Args:
        record: fields with their default value are left out.
        but: further fields that are left out.
    """
    words: list[str] = []
    for name, entry in changed_options(record).items():
        value = getattr(record, name)
        if not entry.help or name in but:
            continue
        if isinstance(value, bool):
            words.append(entry.flags[0])
            continue
        text = str(value).removesuffix(".0") if isinstance(value, float) else str(value)
        texts = [text] if entry.write is None else entry.write(record)
        words += [word for each in texts for word in (entry.flags[0], each)]
    return words


def check_options(record: Any) -> None:
    """Check each value of a record by itself.

    Raises:
        LaunchError: a value is outside its range.
    """
    for name, entry in changed_options(record).items():
        value = getattr(record, name)
        mistake = None if entry.check is None or value is None else entry.check(value)
        if mistake is not None:
            raise LaunchError(mistake[0], where="fnaccel launch", fix=mistake[1])


def read_pair(text: str, flag: str, fix: str) -> tuple[str, str]:
    """The name and the value of `NAME=VALUE`, given by an option. The fix is for an error.

    Raises:
        LaunchError: there is no `=`, or nothing before it.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise LaunchError(f"{text!r} sets nothing", where=f"fnaccel launch {flag}", fix=fix)
    return name, value
