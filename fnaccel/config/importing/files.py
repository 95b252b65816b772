"""Files of other tools, read for `import_document`, and the YAML of an imported recipe with comments."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import yaml

from fnaccel.config.importing.draft import NOTHING, Imported, Row
from fnaccel.config.importing.kinds import import_document, kind_of
from fnaccel.config.recipes import Recipe
from fnaccel.config.yaml import text_of
from fnaccel.errors import ConfigError
from fnaccel.world.plain_data import Repeated, load_json, load_yaml

_ORDER = [field.name for field in attrs.fields(Recipe)]


def parse(path: Path, repeated: Repeated | None = None) -> Any:
    """The document of a file: YAML, or JSON (.json).

    Args:
        path: the file.
        repeated: called with each key that a mapping of YAML or JSON has twice, and with its two values. The
            last one is taken then. By default such a key is an error.

    Raises:
        ConfigError: there is no such file, or it can't be parsed.

    Example:
        >>> Path("ds.json").write_text('{"train_batch_size": 8}')
        >>> parse(Path("ds.json"))
        {'train_batch_size': 8}
    """
    text = text_of(path, "fnaccel config import")
    try:
        if path.suffix == ".json":
            return load_json(text, repeated)
        return load_yaml(text, repeated)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"this can't be parsed: {' '.join(str(error).split())}",
            where=str(path),
            fix="correct the line it names",
        ) from error


def import_file(path: Path, deepspeed: Path | None = None) -> Imported:
    """Import a file. A DeepSpeed file that it names is read beside it, or is the file `deepspeed`.

    A file of Accelerate may have a key twice with the same value. That is a row of the result.

    Raises:
        ConfigError: as `import_document`, a file can't be read, or it gives a key two values.

    Example:
        >>> Path("default_config.yaml").write_text("distributed_type: MULTI_GPU\\nnum_processes: 4")
        >>> import_file(Path("default_config.yaml")).recipe.launch.ranks
        4
    """
    repeated: dict[str, tuple[Any, Any]] = {}

    def repeat(key: str, earlier: Any, later: Any) -> None:
        if key not in repeated or repr(earlier) != repr(later):
            repeated[key] = earlier, later

    document = parse(path, repeat)
    if repeated and _kind(document) != "accelerate":
        parse(path)  # raises: the files of other tools have no key twice
    for key, (earlier, later) in repeated.items():
        if repr(earlier) != repr(later):
            raise ConfigError(
                f"the key {key} is there twice, with two values: {earlier!r} and {later!r}",
                where=str(path),
                fix=f"remove one of the two lines of {key}. Accelerate takes the last one",
            )
    named = document.get("deepspeed_config") if isinstance(document, dict) else None
    name = named.get("deepspeed_config_file") if isinstance(named, dict) else None
    files: dict[str, Mapping[str, Any]] = {}
    if isinstance(name, str) and name.lower() != "none":
        beside = deepspeed or path.parent / name
        if deepspeed is not None or beside.is_file():
            # the recipe names the file as the launcher will find it
            location = str(beside)
            section: dict[str, Any] = {**cast("dict[str, Any]", named), "deepspeed_config_file": location}
            document = {**document, "deepspeed_config": section}
            files[location] = parse(beside)
    imported = import_document(document, path=str(path), files=files)
    rows = [Row(key, "twice", NOTHING, "the key is there twice, with the same value") for key in repeated]
    return attrs.evolve(imported, rows=(*imported.rows, *rows))


def _kind(document: Any) -> str | None:
    try:
        return kind_of(document)
    except ConfigError:
        return None


def commented(imported: Imported, source: str) -> str:
    """The YAML of an imported recipe, and as comments what it needs, and the keys without a meaning.

    Example:
        >>> Path("a.yaml").write_text("num_processes: 2\\nuse_cpu: true\\ndistributed_type: MULTI_CPU")
        >>> print(commented(import_file(Path("a.yaml")), "a.yaml"))
        # imported from a.yaml
        strategy: ddp
        launch:
          machines: 1
          ranks: 2
          cpu: true
    """
    lines = [f"# imported from {source}", *(f"# {note}" for note in imported.notes)]
    tree: dict[str, Any] = {}
    for field, value in imported.fields.items():
        *parents, last = field.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    lines += _emit({name: tree[name] for name in _ORDER if name in tree}, "")
    needs = [row for row in imported.rows if "needs" in row.why.lower()]
    lines += [f"# {row.key}: {row.why}" for row in needs]
    unused = [row.key for row in imported.rows if row.became == NOTHING and row not in needs]
    if unused:
        lines += textwrap.wrap(
            f"without a meaning here: {', '.join(unused)}", 106, initial_indent="# ", subsequent_indent="#   "
        )
    return "\n".join(lines) + "\n"


def _emit(branch: Mapping[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for key, value in branch.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_emit(value, indent + "  ")]
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n")
            lines.append(f"{indent}{key}: {text.strip()}")
    return lines
