"""Files of other tools: which tool a file is for, its import, and the YAML of the recipe with comments."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import yaml

from fnaccel.config.importing import accelerate, deepspeed_file
from fnaccel.config.importing.draft import NOTHING, Imported, Row, tree_of
from fnaccel.config.recipes import Recipe
from fnaccel.config.yaml import text_of
from fnaccel.errors import ConfigError
from fnaccel.world.plain_data import Repeated, load_json, load_yaml

_WHERE = "fa.config.import_document"
_OURS = [field.name for field in attrs.fields(Recipe)]
_DEEPSPEED = set(deepspeed_file.TOP)
_ONLY_OURS = set(_OURS) - accelerate.TOP - _DEEPSPEED


def kind_of(document: object) -> str:
    """`"accelerate"` or `"deepspeed"`, by the keys of a document.

    Raises:
        ConfigError: it is a recipe already, or nothing that can be imported.

    Example:
        >>> kind_of({"zero_optimization": {"stage": 2}})
        'deepspeed'
    """
    if not isinstance(document, Mapping):
        raise ConfigError(
            f"the document holds {type(document).__name__}, not keys and values",
            where=_WHERE,
            fix="give a file of Accelerate (YAML) or DeepSpeed (JSON)",
        )
    keys = {str(key) for key in cast(Mapping[Any, Any], document)}
    counts = {
        "accelerate": len(keys & accelerate.TOP),
        # names that a recipe has too say less
        "deepspeed": len(keys & _DEEPSPEED) - len(keys & _DEEPSPEED & set(_OURS)) / 2,
    }
    kind = max(counts, key=lambda name: counts[name])
    if len(keys & _ONLY_OURS) >= counts[kind] > 0 or (keys <= set(_OURS) and keys):
        raise ConfigError(
            "this is a recipe already", where=_WHERE, fix="fnaccel config validate FILE checks it"
        )
    if counts[kind] == 0:
        raise ConfigError(
            f"no key of the document belongs to a tool that is known: {', '.join(sorted(keys)) or 'no keys'}",
            where=_WHERE,
            fix="give a file of Accelerate (YAML) or DeepSpeed (JSON)",
        )
    return kind


def import_document(
    document: Mapping[str, Any],
    *,
    path: str = "ds_config.json",
    files: Mapping[str, Mapping[str, Any]] | None = None,
) -> Imported:
    """The recipe of another tool's configuration, and one row for each of its keys. Reads no file.

    The tool is found by the keys: Accelerate or DeepSpeed. `fnaccel config import FILE` prints
    the result.

    Args:
        document: the parsed file: `yaml.safe_load` or `json.load`.
        path: for a DeepSpeed document, its file as the recipe is to name it.
        files: parsed DeepSpeed files that an Accelerate document names, by that name.

    Returns:
        `recipe`, `rows` (key, value, became, why) and `fields`.

    Raises:
        ConfigError: it is a recipe, belongs to no known tool, or its values contradict each other.

    Example:
        >>> document = {"distributed_type": "FSDP", "num_machines": 2, "num_processes": 16,
        ...     "main_process_ip": "10.0.0.1", "mixed_precision": "bf16"}
        >>> imported = fa.config.import_document(document)
        >>> imported.recipe.strategy, imported.recipe.launch.ranks
        ('fsdp', 8)
        >>> print(imported.rows[2].became, "-", imported.rows[2].why)
        launch.ranks: 8 - on each of 2 machines
    """
    kind = kind_of(document)
    if kind == "accelerate":
        return accelerate.read(document, files or {})
    return deepspeed_file.read(document, path)


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
    if repeated and tool_of(document) != "accelerate":
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


def tool_of(document: object) -> str | None:
    """As `kind_of`, or None if the document can't be imported."""
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
    lines = [f"# imported from {source}"]
    tree = tree_of(imported.fields)
    lines += _emit({name: tree[name] for name in _OURS if name in tree}, "")
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
        start = f"{indent}{_on_one_line(key)}:"
        if isinstance(value, dict) and value:
            lines += [start, *_emit(value, indent + "  ")]
        else:
            lines.append(f"{start} {_on_one_line(value)}")
    return lines


def _on_one_line(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n...\n").strip()
