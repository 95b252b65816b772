"""Which tool a document is for, and its import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs

from fnaccel.config.importing import accelerate, deepspeed_file
from fnaccel.config.importing.draft import Imported
from fnaccel.config.recipes import Recipe
from fnaccel.errors import ConfigError

_WHERE = "fa.config.import_document"
_OURS = {field.name for field in attrs.fields(Recipe)}
_DEEPSPEED = set(deepspeed_file.TOP)
_ONLY_OURS = _OURS - accelerate.TOP - _DEEPSPEED


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
        "deepspeed": len(keys & _DEEPSPEED) - len(keys & _DEEPSPEED & _OURS) / 2,
    }
    kind = max(counts, key=lambda name: counts[name])
    if len(keys & _ONLY_OURS) >= counts[kind] > 0 or (keys <= _OURS and keys):
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
        `recipe`, `rows` (key, value, became, why), `fields` and `notes`.

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
