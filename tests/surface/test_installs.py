"""Both documented installs: which files they bring, what they make importable, and that pyright finds the types.

Each goes into an empty environment. torch and the rest come from the environment of the tests, by a path file.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.surface.scripts import MISTAKES, RIGHT, WRONG, errors
from tests.surface.structure import PACKAGE

ROOT = PACKAGE.parent
PIP = (sys.executable, "-m", "pip")
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}

pytestmark = pytest.mark.long


def run(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def isolation():
    """Use the build backend that is installed. Else pip downloads it for the build."""
    return [] if importlib.util.find_spec("hatchling") is None else ["--no-build-isolation"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", "--quiet", *isolation(), "-w", folder, ROOT, cwd=folder)
    (built,) = folder.glob("fnaccel-*.whl")
    return built


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, tmp_path_factory):
    """The interpreter of an environment with fnaccel installed in one of both ways.

    Tests run it with -I, so that it does not read PYTHONPATH.
    """
    folder = tmp_path_factory.mktemp(request.param)
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    interpreter = folder / "bin" / "python"
    # before the install, for its build backend; the fnaccel that pip sees there is not its own to replace
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (packages / "of_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if request.param == "wheel":
        chosen = [request.getfixturevalue("wheel")]
    else:
        chosen = [*isolation(), "--editable", ROOT]
    run(
        *PIP,
        "--python",
        interpreter,
        "install",
        "--ignore-installed",
        "--no-deps",
        "--quiet",
        *chosen,
        cwd=folder,
    )
    return interpreter


def test_a_wheel_holds_the_package_its_types_and_its_license(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    info = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "fnaccel").rglob("*.py")}
    assert names == {*sources, "fnaccel/py.typed", *(f"{info}/{name}" for name in METADATA)}


def test_an_installed_package_can_be_imported(python, tmp_path):
    code = "import fnaccel as fa; print(fa.__file__); print(fa.adamw(1e-3).name)"
    file, name = run(python, "-I", "-c", code, cwd=tmp_path).splitlines()
    folder = ROOT if "editable" in python.parents[1].name else python.parents[1]
    assert file.startswith(str(folder))
    assert name == "adamw"
    assert "usage: fnaccel" in run(python.with_name("fnaccel"), "--help", cwd=tmp_path)


def test_pyright_has_nothing_to_say_about_a_right_script(python, tmp_path):
    assert errors([RIGHT], tmp_path, python) == [[]]


def test_pyright_reports_each_mistake_once(python, tmp_path):
    assert errors([WRONG], tmp_path, python) == [list(MISTAKES.items())]


def test_only_the_package_becomes_importable(python, tmp_path):
    folders = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name.isidentifier())
    assert {"tests", "examples", "fnaccel"} <= set(folders)
    code = (
        "import importlib.util, sys\n"
        "for name in sys.argv[1:]:\n"
        "    spec = importlib.util.find_spec(name)\n"
        "    for place in spec.submodule_search_locations or [] if spec else []:\n"
        "        print(place)\n"
    )
    found = [
        Path(line).resolve() for line in run(python, "-I", "-c", code, *folders, cwd=tmp_path).splitlines()
    ]
    installed = (
        [ROOT] if "editable" in python.parents[1].name else [*python.parents[1].glob("lib/*/site-packages")]
    )
    # packages of the tests' environment may bring folders of the same names: Opacus has `benchmarks` and `examples`
    assert [place.name for place in found if place.parent in installed] == ["fnaccel"]
