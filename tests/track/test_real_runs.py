"""A real run with each light tracker, without a network: what it wrote is read back. tests/trackers has the others."""

from __future__ import annotations

import json

import pytest

from tests.track import real_run
from tests.track.read_back import READERS
from tests.track.real_run import CONFIG, TABLE, TEXT

MEDIA = ("image", "figure", "table")
ONE_CALL = {
    "aim": "context epoch",
    "comet": "epoch include_context prefix",
    "dvclive": "plot timestamp",
    "mlflow": "dataset model_id synchronous timestamp",
    "tensorboard": "walltime",
    "wandb": "commit",
}
"""The options of one call of `log`, as docs/tracking.md lists them."""


def check(name, folder, *, abilities, **options):
    """Run a training that logs to one tracker, and compare what it wrote with the values of the run."""
    printed = real_run.start(name, folder, **options)
    assert "FAILURES {}" in printed, printed
    assert f"OPTIONS {ONE_CALL.get(name, '')}".strip() in map(str.strip, printed.splitlines())
    compare(name, folder, abilities)
    return printed


def compare(name, folder, abilities, digits=None):
    """Compare what one tracker wrote with the values of the run: all digits of them, or so many."""
    digits = 7 if name == "tensorboard" else digits  # its files hold fp32
    written = READERS[name](folder)
    first, *rows = map(json.loads, (folder / "expected.jsonl").read_text().splitlines())
    added, *records = [row for row in rows if "note" not in row]
    assert {"plan", "environment"} == added["config"].keys()
    assert first["config"] == CONFIG
    assert len(records) == real_run.STEPS
    names = {"loss", "weight", "grad_norm", "lr"}
    expected = {key: {each["step"]: each[key] for each in records} for key in names}
    expected["eval/width"] = {2: 2.0}
    assert written.texts["note"] == {2: TEXT}
    assert written.texts.keys() - {"plan", "environment"} == {"note"}
    assert name not in ("jsonl", "wandb") or "train step of" in written.config["plan"]
    if digits is None:
        assert written.metrics == expected
    assert written.metrics.keys() == expected.keys()
    for key in expected:
        assert written.metrics[key] == pytest.approx(expected[key], rel=10 ** -(digits or 17))
    config = {"lr": "0.01", "model/width": "2", "model/name": "linear", "nothing": "None"}
    assert written.config.items() >= config.items()
    assert written.image == ((5, 4) if "image" in abilities else None)
    assert written.figure == ("figure" in abilities)
    columns, rows = TABLE
    for cell in [*columns, *(str(cell) for row in rows for cell in row)] if "table" in abilities else []:
        assert cell.split("|")[-1] in written.table
    assert written.artifact == ("kept" if "artifact" in abilities else None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "abilities"),
    [
        ("jsonl", {}, ()),
        ("tensorboard", {}, MEDIA),
        ("wandb", {"mode": "offline", "run_name": "first"}, (*MEDIA, "artifact")),
    ],
)
def test_a_real_run_is_read_back(tmp_path, name, options, abilities):
    check(name, tmp_path, abilities=abilities, **options)
