"""The fixtures of the launcher's tests."""

from tests.launch.conftest import launcher as launcher
from tests.launch.conftest import preloaded as preloaded
