"""Recipes to and from YAML, by cattrs. Errors name a key that is unknown or of the wrong kind."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
import yaml

from fnaccel.config.recipes import Recipe
from fnaccel.config.references import dump
from fnaccel.errors import ConfigError, FnaccelError, nearest
from fnaccel.launch.options import default_of
from fnaccel.world.paths import local_path
from fnaccel.world.plain_data import load_yaml


@functools.cache
def _converter() -> Any:
    import cattrs  # noqa: PLC0415 - slow to import
    from cattrs.strategies import configure_union_passthrough  # noqa: PLC0415

    converter = cattrs.Converter(forbid_extra_keys=True)
    configure_union_passthrough(int | float | str | bool | None, converter)
    # cattrs would call bool("no") and int(2.7)
    converter.register_structure_hook(bool, _truth)
    converter.register_structure_hook(int, _whole)
    converter.register_structure_hook_func(_takes_words, _word)
    return converter


def _truth(value: object, _: type) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false", value)
    return value


def _whole(value: object, _: type) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a whole number", value)
    number = int(value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("a whole number", value)
    return number


def _takes_words(kind: Any) -> bool:
    """Whether it is a Literal, or a union of a Literal and others."""
    return any(get_origin(one) is Literal for one in (kind, *get_args(kind)))


def _word(value: object, kind: Any) -> object:
    """A word as it is. One that is no choice is named by the part that takes it, with the nearest."""
    kinds = get_args(kind)
    if not isinstance(value, (str, *(one for one in kinds if isinstance(one, type)))):
        words = next(get_args(one) for one in (kind, *kinds) if get_origin(one) is Literal)
        raise ValueError(f"one of: {', '.join(words)}", value)
    return value


def text_of(path: Path, where: str) -> str:
    """The text of a file.

    Raises:
        ConfigError: there is no such file, it can't be read, or it is no text.

    Example:
        >>> Path("gpt.yaml").write_text("strategy: fsdp")
        >>> text_of(Path("gpt.yaml"), "a recipe")
        'strategy: fsdp'
    """
    if not local_path(path, where).is_file():
        raise ConfigError(f"there is no file {path}", where=where, fix="check the path")
    try:
        return path.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a mark
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}", where=where, fix="check its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8", where=where, fix="write it in UTF-8") from error


def to_yaml(recipe: Recipe) -> str:
    """A recipe as YAML. Fields with their default value are left out.

    Raises:
        NotSerializableError: it holds a lambda or a closure.

    Example:
        >>> print(fa.config.to_yaml(fa.config.Recipe(strategy="fsdp", precision="bf16")))
        strategy: fsdp
        precision: bf16
    """
    plain = _plain(recipe, "Recipe")
    return yaml.safe_dump(plain, sort_keys=False)


def _plain(record: object, where: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for field in attrs.fields(type(record)):
        value = getattr(record, field.name)
        if value == default_of(field):
            continue
        path = f"{where}.{field.name}"
        if isinstance(value, tuple | list):
            fields[field.name] = [dump(item, path) for item in value]
        elif isinstance(value, dict):
            fields[field.name] = {key: _plain_value(item, f"{path}.{key}") for key, item in value.items()}
        else:
            fields[field.name] = _plain_value(value, path)
    return fields


def _plain_value(value: object, path: str) -> Any:
    return _plain(value, path) if attrs.has(type(value)) else dump(value, path)


def from_yaml(source: str | Path, mistakes: list[FnaccelError] | None = None) -> Recipe:
    """A recipe from YAML text or from a file (a `Path`, or a string that ends in .yaml or .yml).

    Args:
        source: the text or the file.
        mistakes: a list that takes all mistakes in keys and values. Without it the first one raises.

    Raises:
        ConfigError: no such file, no mapping, a key that is unknown (the nearest is named), or a
            value of the wrong kind.

    Example:
        >>> Path("gpt.yaml").write_text("strategy: fsdp\\nclip_norm: 1.0")
        >>> fa.config.from_yaml("gpt.yaml").clip_norm
        1.0
    """
    where = "a recipe"
    text = str(source)
    if isinstance(source, Path) or text.endswith((".yaml", ".yml")):
        where = text
        text = text_of(Path(source), "fa.config.from_yaml")
    try:
        plain = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"this is not YAML: {' '.join(str(error).split())}", where=where, fix="correct the line it names"
        ) from error
    return read(plain, where, mistakes)


def read(plain: Any, where: str, mistakes: list[FnaccelError] | None = None) -> Recipe:
    """A recipe from plain dicts and values.

    Raises:
        ConfigError: as `from_yaml`.
    """
    found: list[FnaccelError] = [] if mistakes is None else mistakes
    known = _known(plain, Recipe, where, found)
    for key in [*known]:  # one by one: a mistake in one section hides none of another
        try:
            _converter().structure({key: known[key]}, Recipe)
        except Exception as error:
            found.append(_mistake_in(error) or _wrong_kind(error, where))
            del known[key]
    if mistakes is None and found:
        raise found[0]
    return _converter().structure(known, Recipe)


def _wrong_kind(error: Exception, where: str) -> ConfigError:
    from cattrs import transform_error  # noqa: PLC0415 - slow to import

    problems = "; ".join(transform_error(error, path="recipe", format_exception=_described))
    what = f"a value is of the wrong kind: {problems}"
    return ConfigError(what, where=where, fix="see fnaccel.config.Recipe for the kinds")


def _described(error: BaseException, kind: type | None) -> str:
    """What cattrs says of a wrong value, with the value."""
    from cattrs.v import format_exception  # noqa: PLC0415 - slow to import

    if isinstance(error, ValueError) and len(error.args) == 2:  # of `_truth` and `_whole`
        wanted, value = error.args
        return f"{value!r:.60} is not {wanted}"
    said = format_exception(error, kind)
    return (
        f"{said}: {str(error)[:100]}" if isinstance(error, ValueError | TypeError | OverflowError) else said
    )


def _mistake_in(error: BaseException) -> FnaccelError | None:
    """The three-line error of a recipe's own checks, out of the errors that cattrs wrapped around it."""
    if isinstance(error, FnaccelError):
        return error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return next((mistake for child in inner if (mistake := _mistake_in(child)) is not None), None)


def _known(plain: Any, cls: type, where: str, mistakes: list[FnaccelError]) -> dict[str, Any]:
    """The keys that a record has. The others are mistakes."""
    hints = get_type_hints(cls)
    names = [field.name for field in attrs.fields(cls)]
    known: dict[str, Any] = {}
    for key, value in _mapping(plain, where, mistakes).items():
        inner = f"{where}: {key}"
        if key not in names:
            text = f"{cls.__name__} has no key {key!r}"
            mistakes.append(ConfigError(text, where=where, fix=nearest(str(key), names)))
            continue
        known[key] = _known(value, hints[key], inner, mistakes) if attrs.has(hints[key]) else value
        for kind in filter(attrs.has, get_args(hints[key])):  # a mapping of records
            records = _mapping(value, inner, mistakes).items()
            known[key] = {name: _known(each, kind, f"{inner}: {name}", mistakes) for name, each in records}
    return known


def _mapping(plain: Any, where: str, mistakes: list[FnaccelError]) -> dict[Any, Any]:
    if isinstance(plain, dict):
        return plain  # pyright: ignore[reportUnknownVariableType] - of the user's file
    text = f"{where} holds {type(plain).__name__}, not keys and values"
    mistakes.append(ConfigError(text, where=where, fix="write `key: value` lines"))
    return {}


def override(recipe: Recipe, overrides: dict[str, Any], where: str = "overrides") -> Recipe:
    """A recipe with dotted fields replaced: `{"strategy": "fsdp", "optimizer.lr": 1e-4}`.

    Args:
        recipe: the recipe to change a copy of.
        overrides: dotted fields and values.
        where: the source of the overrides, for an error.

    Raises:
        ConfigError: as `from_yaml`.
    """
    plain: dict[str, Any] = attrs.asdict(recipe)
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        inner = plain
        for parent in parents:
            if not isinstance(inner.get(parent), dict):
                raise ConfigError(
                    f"a recipe has no part {parent!r}", where=f"{where}: {dotted}", fix=nearest(parent, inner)
                )
            inner = inner[parent]
        inner[last] = value
    return read(plain, where)
