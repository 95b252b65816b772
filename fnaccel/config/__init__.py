"""A run's choices as a frozen value, from and to YAML, and applied."""

from typing import TYPE_CHECKING

from fnaccel import _lazy
from fnaccel.config.recipes import CheckpointRecipe as CheckpointRecipe
from fnaccel.config.recipes import DataRecipe as DataRecipe
from fnaccel.config.recipes import OptimizerRecipe as OptimizerRecipe
from fnaccel.config.recipes import Recipe as Recipe
from fnaccel.config.recipes import RunRecipe as RunRecipe
from fnaccel.config.recipes import TrackingRecipe as TrackingRecipe
from fnaccel.config.yaml import from_yaml as from_yaml
from fnaccel.config.yaml import to_yaml as to_yaml
from fnaccel.launch.recipe import LaunchRecipe as LaunchRecipe
from fnaccel.launch.sections import HostsRecipe as HostsRecipe
from fnaccel.launch.sections import SageMakerRecipe as SageMakerRecipe
from fnaccel.launch.sections import TpuVmRecipe as TpuVmRecipe

if TYPE_CHECKING:
    from fnaccel.config.applying import apply as apply
    from fnaccel.config.applying import recipe as recipe
    from fnaccel.config.applying import scan_options as scan_options
    from fnaccel.config.applying import shard_options as shard_options
    from fnaccel.config.importing.draft import Imported as Imported
    from fnaccel.config.importing.draft import Row as Row
    from fnaccel.config.importing.files import import_document as import_document
else:  # applying a recipe needs torch, which takes seconds to import. Reading and writing one does not
    __getattr__, __dir__, __all__ = _lazy.attach(
        __name__,
        {
            "fnaccel.config.applying": "apply recipe scan_options shard_options",
            "fnaccel.config.importing.draft": "Imported Row",
            "fnaccel.config.importing.files": "import_document",
        },
    )
