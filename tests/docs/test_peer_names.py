"""docs/accelerate-names.md against the names of Accelerate's documents, and against the names of fnaccel. The guide before it.

`peer_names.json` is made by `docs/peer_names.py` from the documents, which are not part of this repository.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import attrs
import pytest

import fnaccel as fa
from tests.docs.names import ROOT, SPAN, check

NAMES = json.loads((Path(__file__).parent / "peer_names.json").read_text())
STATUS = re.compile(r"here(, not run on hardware)?|planned|none, because \S.+")


@attrs.frozen
class Row:
    """A row of the page, with the headings of its section."""

    heading: str
    peer: str
    here: str
    status: str

    @property
    def tokens(self) -> set[str]:
        """Names in the first column."""
        return {
            token for span in SPAN.findall(self.peer) for token in re.findall(r"--\w+(?:-\w+)*|\w+", span)
        }


def rows_of(text: str) -> list[Row]:
    """All rows of the tables that end in a status."""
    rows, heading, status = [], "", False
    for line in text.splitlines():
        if line.startswith("#"):
            heading, status = line, False
        elif not line.startswith("|"):
            status = False
        else:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if cells[-1] == "status":
                status = True
            elif status and set(line) - set("|- "):
                assert len(cells) == 3, line
                rows.append(Row(heading, *cells))
    return rows


PAGE = (ROOT / "docs" / "accelerate-names.md").read_text()
ROWS = rows_of(PAGE)
GUIDE = (ROOT / "docs" / "from-accelerate.md").read_text()


def missing(rows: list[Row]) -> list[str]:
    """The names without a row."""
    tokens = {token for row in rows for token in row.tokens}
    by_owner: dict[str, set[str]] = defaultdict(set)  # `owner(argument=)`, and the section of a class
    for row in rows:
        for owner in re.findall(r"`(\w+)`", row.heading):
            by_owner[owner] |= row.tokens
        for owner, arguments in re.findall(r"(\w+)\(([^`)]*)\)", " ".join(SPAN.findall(row.peer))):
            by_owner[owner] |= set(re.findall(r"(\w+)=", arguments))
    flat = ("objects", "flags", "environment variables", "values", "words")
    absent = [name for kind in flat for name in NAMES[kind] if name not in tokens]
    absent += [key for key in NAMES["keys of configuration files"] if not {key, f"--{key}"} & tokens]
    absent += [
        f"accelerate {name}" for name in NAMES["commands"] if not any(_says(row, name) for row in rows)
    ]
    for owner, arguments in NAMES["arguments"].items():
        absent += [f"{owner}({name}=)" for name in arguments if name not in by_owner[owner]]
    for owner, members in NAMES["members"].items():
        scope = tokens if owner == "Accelerator" else by_owner[owner]
        absent += [f"{owner}.{name}" for name in members if name not in scope]
    return absent


def _says(row: Row, command: str) -> bool:
    return f"accelerate {command}" in SPAN.findall(row.peer)


def test_every_name_has_a_row():
    assert sum(len(NAMES[kind]) for kind in ("objects", "flags")) > 200
    assert not missing(ROWS)


def without_a_row(names, rows=ROWS):
    """Names of the installed package that no row has: as a flag, or as a key of the same name."""
    tokens = {token for row in rows for token in row.tokens}
    return [name for name in names if not {name, name.removeprefix("--")} & tokens]


def launch_flags():
    """The long flags of the installed `accelerate launch`, with underscores."""
    launch = pytest.importorskip("accelerate.commands.launch")
    options = [action.option_strings for action in launch.launch_command_parser()._actions]
    return {max(each, key=lambda flag: (flag.count("_"), len(flag))) for each in options if each}


def test_every_flag_of_the_installed_parser_has_a_row():
    flags = launch_flags()
    assert {"--num_processes", "--use_parallelism_config"} <= flags
    assert without_a_row(sorted(flags)) == []
    fewer = [row for row in ROWS if "--parallelism_config_cp_size" not in row.tokens]
    assert without_a_row(sorted(flags), fewer) == ["--parallelism_config_cp_size"]


def test_every_command_of_the_installed_package_has_a_row():
    commands = pytest.importorskip("accelerate.commands")
    modules = {module.name for module in pkgutil.iter_modules(commands.__path__)}
    parts = {
        "estimate": "estimate-memory",
        "merge": "merge-weights",
        "tpu": "tpu-config",
        "to_fsdp2": "to-fsdp2",
    }
    shown = [parts.get(name, name) for name in modules - {"accelerate_cli", "menu", "utils"}]
    assert {"launch", "to-fsdp2"} <= set(shown)
    assert [name for name in shown if not any(_says(row, name) for row in ROWS)] == []


@pytest.mark.parametrize(
    "name",
    [
        "ParallelismConfig",
        "TorchTensorParallelConfig",
        "TorchContextParallelConfig",
        "DeepSpeedSequenceParallelConfig",
    ],
)
def test_every_field_of_products_has_a_row(name):
    kind = getattr(pytest.importorskip("accelerate.utils"), name)
    members = {each for each in dir(kind) if not each.startswith("_")} | set(
        inspect.signature(kind).parameters
    )
    assert without_a_row(sorted({name, *members})) == []


@pytest.mark.parametrize("name", ["AlignDevicesHook", "--gpu_ids", "check_reduction", "write_basic_config"])
def test_a_row_that_is_left_out_is_found(name):
    assert any(name in absent for absent in missing([row for row in ROWS if name not in row.tokens]))


def test_every_row_has_one_of_three_statuses():
    assert len(ROWS) > 200
    assert [row for row in ROWS if not STATUS.fullmatch(row.status)] == []
    assert [row.peer for row in ROWS if row.status.startswith("here") and not row.here] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.peer[:50]} {row.here[:30]}")
def test_the_form_here_exists(row, things):
    for span in SPAN.findall(row.here):
        check(span, things)


@pytest.mark.parametrize(
    "span", ["fa.fsdp(unit=3)", "fa.nothing", "fnaccel launch --gpu 2", "world.ranks", "fa.ddp(hook='fp8')"]
)
def test_a_name_that_does_not_exist_is_found(span, things):
    with pytest.raises((AssertionError, AttributeError, fa.errors.FnaccelError)):
        check(span, things)


def test_the_names_are_read_from_documents(tmp_path):
    """The script on a small document: names of every kind, and no prose."""
    pytest.importorskip("accelerate")
    (tmp_path / "guide.md").write_text(DOCUMENT)
    things = runpy.run_path(str(ROOT / "docs" / "peer_names.py"))["names"](tmp_path)
    assert things["objects"] == ["ProfileKwargs", "get_logger"]
    assert things["flags"] == ["--fsdp_offload_params", "--num_processes"]
    assert things["commands"] == ["launch"]
    assert things["keys of configuration files"] == ["distributed_type", "machine_rank"]
    assert things["environment variables"] == ["ACCELERATE_DEBUG_MODE"]
    assert things["values"] == ["FSDP", "NO_SHARD"]
    assert things["words"] == ["in_order"]
    assert things["arguments"]["ProfileKwargs"].count("with_stack") == 1
    assert "gather_for_metrics" in things["members"]["Accelerator"]


def test_the_guide_counts_its_traps():
    traps = GUIDE.partition("\n## Traps\n")[2].partition("\n## ")[0]
    numbers = re.findall(r"^\| (\d) \|", traps, re.MULTILINE)
    assert numbers == ["1", "2", "3", "4", "5"]
    assert "the five traps" in GUIDE
    assert "\nFive things" in traps


@pytest.mark.long
def test_the_two_scripts_of_the_guide_reach_the_same_score(tmp_path):
    pytest.importorskip("accelerate")
    scores = []
    for number, code in enumerate(
        re.findall(r"^```python[^\n]*\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train.py").write_text(code)
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=folder, env=environ, capture_output=True, text=True, check=True
        )
        last = re.fullmatch(r"epoch 9: (\d\.\d+) right", done.stdout.splitlines()[-1])
        scores.append(float(last[1]))
    assert len(scores) == 2
    assert min(scores) > 0.85
    assert abs(scores[0] - scores[1]) < 0.02


DOCUMENT = """
Set `ACCELERATE_DEBUG_MODE`, or `--fsdp_offload_params`. `NO_SHARD` is a strategy, `from_pretrained` is not ours.

[[autodoc]] utils.ProfileKwargs

```python
from accelerate.logging import get_logger
log = get_logger(__name__, log_level="DEBUG")
accelerator.gather_for_metrics(x)
```

Pass `in_order=True`.

```bash
accelerate launch --num_processes 2 train.py --lr 3
```

```yaml
distributed_type: FSDP
machine_rank: 0
```
"""
