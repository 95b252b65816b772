"""`FNACCEL_SET="strategy=fsdp optimizer.lr=1e-4"`: fields of the recipe in an environment variable.

The launcher, `fa.start` and `fa.config.recipe` read it. Nothing here knows which fields a recipe has.
"""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from fnaccel.errors import ConfigError
from fnaccel.world.launched import detect
from fnaccel.world.plain_data import check_plain, load_json, load_yaml

VARIABLE = "FNACCEL_SET"
_OF_START = ("launch.cpu", "launch.watchdog")
_shown: set[str] = set()


def parse_value(text: str) -> Any:
    """A value as JSON, Python or YAML writes it. Any other text is itself.

    JSON and Python come first: YAML reads `1e-4` as text, and `1:30` as 90. So of YAML only lists, mappings
    and words such as `yes` are taken.

    Raises:
        ConfigError: a list or a mapping that is too long or too deep, or holds an alias.

    Example:
        >>> parse_value("1e-4"), parse_value("bf16"), parse_value("[jsonl, wandb]")
        (0.0001, 'bf16', ['jsonl', 'wandb'])
    """
    for read in (load_json, ast.literal_eval):
        try:
            return check_plain(read(text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    try:
        value = load_yaml(check_plain(text))
    except (ValueError, yaml.YAMLError) as error:
        if text.lstrip()[:1] not in ("[", "{") and text.isprintable():
            return text
        raise ConfigError(
            f"{text!a:.60} can't be read: {' '.join(str(error).split())}",
            where="a value of --set or FNACCEL_SET",
            fix="write a list as [jsonl, wandb], and a mapping as {name: wandb, project: gpt}",
        ) from None
    return value if isinstance(value, list | dict | bool) and text.strip() else text


def parse_field(text: str) -> tuple[str, Any] | None:
    """The dotted field and the value of `KEY=VALUE`, or None if the text has no key or no value.

    Example:
        >>> parse_field("optimizer.lr=1e-4")
        ('optimizer.lr', 0.0001)
    """
    field, equals, value = text.partition("=")
    if not equals or not field.strip():
        return None
    return field.strip(), parse_value(value)


def read(environ: Mapping[str, str]) -> dict[str, Any]:
    """The dotted fields of FNACCEL_SET, and their values.

    Args:
        environ: the environment. Words are separated as in a shell: values with spaces are in quotes.

    Raises:
        ConfigError: the text is not a list of `KEY=VALUE`.

    Example:
        >>> read({"FNACCEL_SET": "strategy='ddp(2) * fsdp(4)' optimizer.lr=1e-4"})
        {'strategy': 'ddp(2) * fsdp(4)', 'optimizer.lr': 0.0001}
    """
    text = environ.get(VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}", where=VARIABLE, fix="close each quote") from error
    fields: dict[str, Any] = {}
    for word in words:
        pair = parse_field(word)
        if pair is None:
            raise ConfigError(
                f"{word!r} sets nothing",
                where=VARIABLE,
                fix=f'write KEY=VALUE: {VARIABLE}="strategy=fsdp optimizer.lr=1e-4"',
            )
        fields[pair[0]] = pair[1]
    return fields


def for_start(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields of FNACCEL_SET that `fa.start` uses: `launch.cpu` and `launch.watchdog`.

    The whole text is read, and shown on rank 0.

    Raises:
        ConfigError: the text can't be read, or one of the two has a value of the wrong kind.

    Example:
        >>> for_start({"FNACCEL_SET": "launch.watchdog=600"})
        {'launch.watchdog': 600}
    """
    fields = {name: value for name, value in read(environ).items() if name in _OF_START}
    show(environ)
    for name, kinds, fix in (
        ("launch.cpu", bool, "launch.cpu=true"),
        ("launch.watchdog", int | float, "seconds of 0 or more, such as launch.watchdog=600"),
    ):
        value = fields.get(name, 0)
        if name in fields and (not isinstance(value, kinds) or value < 0):
            raise ConfigError(f"{name}={value!r}", where=VARIABLE, fix=fix)
    return fields


def show(environ: Mapping[str, str]) -> None:
    """Print on rank 0 that FNACCEL_SET is used, once for each value, and which fields have no effect."""
    text = environ.get(VARIABLE, "").strip()
    if text and text not in _shown and detect(environ).rank == 0:
        print(f"fnaccel: {VARIABLE} sets {text}", file=sys.stderr, flush=True)
        unused = launcher_fields(read(environ))
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            line = f"{', '.join(unused)} {verb} no effect here. Only fnaccel launch starts processes"
            print(f"fnaccel: {line}", file=sys.stderr, flush=True)
    _shown.add(text)


def launcher_fields(fields: Mapping[str, Any]) -> list[str]:
    """The fields that only `fnaccel launch` can use: ranks cannot be started any more.

    Example:
        >>> launcher_fields({"launch.ranks": 2, "launch.cpu": True, "strategy": "ddp"})
        ['launch.ranks']
    """
    return [name for name in fields if name.startswith("launch.") and name not in _OF_START]
