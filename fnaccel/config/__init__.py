"""A run's choices as a frozen value, from and to YAML, and applied."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fnaccel.config.applying import apply as apply
    from fnaccel.config.applying import recipe as recipe
    from fnaccel.config.applying import scan_options as scan_options
    from fnaccel.config.applying import shard_options as shard_options
from fnaccel.config.carriers import HostsRecipe as HostsRecipe
from fnaccel.config.carriers import SageMakerRecipe as SageMakerRecipe
from fnaccel.config.carriers import TpuVmRecipe as TpuVmRecipe
from fnaccel.config.importing.draft import Imported as Imported
from fnaccel.config.importing.draft import Row as Row
from fnaccel.config.importing.kinds import import_document as import_document
from fnaccel.config.recipes import CheckpointRecipe as CheckpointRecipe
from fnaccel.config.recipes import DataRecipe as DataRecipe
from fnaccel.config.recipes import OptimizerRecipe as OptimizerRecipe
from fnaccel.config.recipes import Recipe as Recipe
from fnaccel.config.recipes import TrackingRecipe as TrackingRecipe
from fnaccel.config.running import LaunchRecipe as LaunchRecipe
from fnaccel.config.running import RunRecipe as RunRecipe
from fnaccel.config.yaml import from_yaml as from_yaml
from fnaccel.config.yaml import to_yaml as to_yaml

_APPLIED = ("apply", "recipe", "scan_options", "shard_options")


def __getattr__(name: str) -> Any:
    # what applies a recipe needs torch, which takes seconds to import. To read and write one does not
    if name not in _APPLIED:
        raise AttributeError(f"module 'fnaccel.config' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module("fnaccel.config.applying"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_APPLIED} - {"Any", "TYPE_CHECKING", "importlib"})
