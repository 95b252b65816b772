"""Records of the section `launch` that one carrier each reads. `fnaccel.launch.sections` defines them."""

from fnaccel.launch.sections import HostsRecipe as HostsRecipe
from fnaccel.launch.sections import SageMakerRecipe as SageMakerRecipe
from fnaccel.launch.sections import TpuVmRecipe as TpuVmRecipe
