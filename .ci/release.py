"""`make release`: builds the wheel and the sdist in dist/, checks them, and prints how a person uploads them.

    python .ci/release.py --tools .venv-release/bin

Nothing is uploaded, tagged or changed. The checks, each of which ends the script with a message:

1. pyproject.toml, `fnaccel.__version__`, CITATION.cff and the first heading of CHANGELOG.md name one version.
2. `build` makes the sdist, and the wheel from the sdist. So the sdist has all that an install needs.
3. `twine check --strict` reads the metadata, and renders the README as PyPI does.
4. A fresh environment takes the wheel with constraints.txt. `fnaccel --help` and `fnaccel env` run there, and
   SCRIPT trains on one rank and on two. The current folder is another one than the repository, so that the
   installed package is imported.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = """\
import torch
import fnaccel as fa

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
rows = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
shards = fa.shard(torch.utils.data.DataLoader(rows, batch_size=16))
loss_fn = lambda model, batch: fa.Mean((model(batch[0]) - batch[1]).square().sum(), weight=len(batch[0]))
with fa.start() as world:
    model = fa.distribute(lambda: torch.nn.Linear(4, 1))
    train_step = fa.train_step(loss_fn, model=model, optimizer=fa.adamw(0.1))
    for state, metrics in fa.scan(train_step, train_step.init(seed=0), shards, epochs=20):
        pass
    world.print("loss", float(metrics["loss"]))
"""


def versions(root: Path = ROOT) -> dict[str, str]:
    """The version that each file names."""
    changelog = re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    package = re.search(
        r'^__version__ = "(.+)"$', (root / "fnaccel" / "__init__.py").read_text(), re.MULTILINE
    )
    citation = re.search(r'^version: "?([^"\n]+)"?$', (root / "CITATION.cff").read_text(), re.MULTILINE)
    found = {"CHANGELOG.md": changelog, "fnaccel/__init__.py": package, "CITATION.cff": citation}
    named = {name: match[1] if match else "none" for name, match in found.items()}
    return {
        "pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"],
        **named,
    }


def the_version(named: dict[str, str]) -> str:
    """The version, if all files name the same one."""
    if len(set(named.values())) != 1:
        lines = "\n".join(f"  {version:10} {name}" for name, version in named.items())
        raise SystemExit(f"the files name several versions:\n{lines}")
    return next(iter(named.values()))


def to_do(version: str, changelog: str, files: list[Path], changed: str) -> str:
    """What a person has to do, with the commands."""
    first = []
    if f"## {version} (unreleased)" in changelog:
        first.append(
            f'write the date into CHANGELOG.md: "## {version} (2027-01-31)" in place of "(unreleased)"'
        )
    if changed.strip():
        first.append(f"commit or undo what has changed:\n{changed.rstrip()}")
    steps = "".join(f"  - {step}\n" for step in first)
    before = f"Before an upload, and then run `make release` again:\n{steps}\n" if first else ""
    names = " ".join(f"dist/{file.name}" for file in files)
    sums = "\n".join(f"  {hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in files)
    return f"""
{before}To upload these files, whose SHA-256 sums are

{sums}

  git tag -a v{version} -m "fnaccel {version}" && git push origin v{version}
  .venv-release/bin/twine upload --repository testpypi {names}    # a trial, with a token of test.pypi.org
  .venv-release/bin/twine upload {names}                          # with a token of pypi.org
  pip install fnaccel=={version} && fnaccel env                   # in an environment of its own

Then open the next version: raise it in the four files, and begin CHANGELOG.md with "## NEXT (unreleased)".
"""


def run(*command: object, cwd: Path = ROOT) -> str:
    """Run a command, and return what it prints. An error ends the script."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environ, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(tools: Path) -> list[Path]:
    """The sdist, and the wheel made from it, in dist/."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(tools / "python", "-m", "build", "--outdir", ROOT / "dist")
    files = sorted((ROOT / "dist").iterdir())
    run(tools / "twine", "check", "--strict", *files)
    return files


def try_wheel(wheel: Path, version: str, folder: Path) -> None:
    """Install the wheel in a fresh environment and train with it."""
    run(sys.executable, "-m", "venv", folder / "venv")
    programs = folder / "venv" / "bin"
    run(
        programs / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        ROOT / "constraints.txt",
        wheel,
        cwd=folder,
    )
    if "usage: fnaccel" not in run(programs / "fnaccel", "--help", cwd=folder):
        raise SystemExit("fnaccel --help prints no usage")
    if not re.search(
        rf"^fnaccel +{re.escape(version)}$", run(programs / "fnaccel", "env", cwd=folder), re.MULTILINE
    ):
        raise SystemExit(f"fnaccel env does not print the version {version}")
    (folder / "train.py").write_text(SCRIPT)
    alone = run(programs / "python", "train.py", cwd=folder)
    together = run(programs / "fnaccel", "launch", "-n", "2", "--cpu", "--quiet", "train.py", cwd=folder)
    losses = [float(found) for found in re.findall(r"^loss (\S+)$", alone + together, re.MULTILINE)]
    if len(losses) != 2 or max(losses) > 0.1 or abs(losses[0] - losses[1]) > 1e-4:
        raise SystemExit(f"the script does not train, or differs on two ranks:\n{alone}{together}")


def main() -> None:
    """Build, check, and print what is to do."""
    parser = argparse.ArgumentParser(description="Build and check a release.")
    parser.add_argument("--tools", type=Path, required=True, help="the folder of python and twine")
    tools = parser.parse_args().tools.absolute()
    version = the_version(versions())
    files = build(tools)
    wheel = next(file for file in files if file.suffix == ".whl")
    inside = len(zipfile.ZipFile(wheel).namelist())
    print("built and read by twine:", *(f"{file.name} ({file.stat().st_size:,} bytes)" for file in files))
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(wheel, version, Path(folder))
    print(f"installed in a fresh environment: {inside} files, the command runs, one rank and two train alike")
    changed = run("git", "status", "--porcelain")
    print(to_do(version, (ROOT / "CHANGELOG.md").read_text(), files, changed))


if __name__ == "__main__":
    main()
