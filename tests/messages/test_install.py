"""A fix that installs an extra names the checkout that fnaccel was installed from, and otherwise the package."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys

import pytest

import fnaccel as fa
from fnaccel.errors import MissingBackendError, install_line
from tests.surface.structure import FILES, PACKAGE

PACKAGED = "pip install 'fnaccel[deepspeed]'"


def install(monkeypatch, tmp_path, origin):
    """Let this process see an installation of fnaccel with this direct_url.json. None: without such a file."""
    folder = tmp_path / "fnaccel-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: fnaccel\nVersion: 0.1.0\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(origin if isinstance(origin, str) else json.dumps(origin))
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_editable_install_names_its_checkout(monkeypatch, tmp_path):
    checkout = tmp_path / "my checkout"
    checkout.mkdir()
    install(monkeypatch, tmp_path / "site", {"url": checkout.as_uri(), "dir_info": {"editable": True}})
    assert "%20" in checkout.as_uri()
    assert install_line("deepspeed") == f'pip install -e "{checkout}[deepspeed]"'
    assert install_line("cli") == f'pip install -e "{checkout}[cli]"'


def test_a_copy_of_a_checkout_is_installed_as_a_copy_again(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path / "site", {"url": tmp_path.as_uri(), "dir_info": {}})
    assert install_line("deepspeed") == f'pip install "{tmp_path}[deepspeed]"'


@pytest.mark.parametrize(
    "origin",
    [
        None,  # from an index
        {"url": "file:///gone/fnaccel", "dir_info": {"editable": True}},
        {"url": "https://example.org/fnaccel-0.1.0-py3-none-any.whl", "archive_info": {}},
        {"url": "https://example.org/fnaccel.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
        "no json",
        "[]",
        '{"url": "file:///", "dir_info": []}',
        '{"dir_info": {}}',
    ],
)
def test_other_installations_name_the_package(monkeypatch, tmp_path, origin):
    install(monkeypatch, tmp_path, origin)
    assert install_line("deepspeed") == PACKAGED


def test_without_an_installation(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install_line("deepspeed") == PACKAGED


# (extra, the module whose import fails, what asks for it)
ASKED = [
    ("deepspeed", "deepspeed.utils.zero_to_fp32", lambda: importlib.import_module("fnaccel.interchange.sources.deepspeed")._converter()),
    ("cli", "shtab", lambda: importlib.import_module("fnaccel.cli.completion").run(["bash"])),
    ("wandb", "wandb", lambda: fa.track.WandbTracker().start({})),
    ("quantize", "torchao.float8", lambda: importlib.import_module("fnaccel.transforms.float8.torchao").backend("here")),
    ("rich", "rich.console", lambda: fa.seeing.get_logger("x", rich=True)),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "module", "ask"), ASKED, ids=lambda value: str(value)[:20])
def test_the_fix_of_a_missing_extra(monkeypatch, tmp_path, extra, module, ask):
    (tmp_path / "checkout").mkdir()
    url = (tmp_path / "checkout").as_uri()
    install(monkeypatch, tmp_path / "site", {"url": url, "dir_info": {"editable": True}})
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingBackendError) as raised:
        ask()
    assert f'pip install -e "{tmp_path / "checkout"}[{extra}]"' in raised.value.fix


def test_the_help_of_the_questions_has_the_line():
    assert (
        f"({install_line('cli')})"
        in importlib.import_module("fnaccel.cli.options.config").ask().format_help()
    )


def test_the_line_is_written_in_one_place():
    written = re.compile(r"pip install[^\n]*\bfnaccel\[")
    places = [str(path.relative_to(PACKAGE)) for path in FILES if written.search(path.read_text())]
    assert places == ["errors.py"]


def test_every_extra_that_a_fix_names_exists():
    import tomllib

    extras = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {name for path in FILES for name in re.findall(r"install_line\(\"(\w+)\"", path.read_text())}
    assert {"deepspeed", "quantize", "cli"} <= named <= set(extras)


def test_the_line_costs_nothing_until_it_is_asked_for():
    code = "import sys, fnaccel.errors; assert 'importlib.metadata' not in sys.modules"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=PACKAGE.parent)
