"""The launcher's fixtures."""

from tests.launch.conftest import launcher as launcher
from tests.launch.conftest import preloaded as preloaded
