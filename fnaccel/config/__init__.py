"""A run's choices as a frozen value, from and to YAML, and applied."""

from fnaccel.config.apply import apply as apply
from fnaccel.config.apply import recipe as recipe
from fnaccel.config.apply import scan_options as scan_options
from fnaccel.config.apply import shard_options as shard_options
from fnaccel.config.carriers import HostsRecipe as HostsRecipe
from fnaccel.config.carriers import SageMakerRecipe as SageMakerRecipe
from fnaccel.config.carriers import TpuVmRecipe as TpuVmRecipe
from fnaccel.config.importing.draft import Imported as Imported
from fnaccel.config.importing.draft import Row as Row
from fnaccel.config.importing.kinds import import_document as import_document
from fnaccel.config.recipe import CheckpointRecipe as CheckpointRecipe
from fnaccel.config.recipe import DataRecipe as DataRecipe
from fnaccel.config.recipe import OptimizerRecipe as OptimizerRecipe
from fnaccel.config.recipe import Recipe as Recipe
from fnaccel.config.recipe import TrackingRecipe as TrackingRecipe
from fnaccel.config.running import LaunchRecipe as LaunchRecipe
from fnaccel.config.running import RunRecipe as RunRecipe
from fnaccel.config.yaml import from_yaml as from_yaml
from fnaccel.config.yaml import to_yaml as to_yaml
