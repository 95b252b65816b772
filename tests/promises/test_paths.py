"""Paths that a user gives: addresses of stores raise everywhere, and a page never replaces a device, a pipe or a folder."""

from __future__ import annotations

import os
import pathlib
import re

import pytest
import torch

import fnaccel as fa
from fnaccel.cli.main import main
from fnaccel.errors import ArgumentError
from fnaccel.world.paths import local_path, output_file
from tests.tiny_models import program

ADDRESSES = [
    "s3://bucket/x",
    "gs://bucket/x",
    "hdfs://host/x",
    "file:///tmp/x",
    pathlib.Path("s3://bucket/x"),
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not [name for name in os.listdir(tmp_path) if name.endswith(":")]  # noqa: PTH208


@pytest.mark.parametrize("address", ADDRESSES, ids=str)
def test_an_address_is_no_path(address):
    with pytest.raises(ArgumentError, match="is an address") as raised:
        local_path(address, "here")
    scheme = str(address).split(":")[0]
    assert raised.value.what.startswith(f"'{scheme}://")
    wanted = "leave file:// out" if scheme == "file" else f"where the {scheme} store is mounted"
    assert wanted in raised.value.fix


def test_a_path_class_of_a_store_is_no_path():
    """Those of cloudpathlib have a path of this machine: that of a cache."""

    class Cloud(os.PathLike):
        def __fspath__(self):
            return "/tmp/cache/x"

        def __str__(self):
            return "s3://bucket/x"

    with pytest.raises(ArgumentError, match="is an address"):
        local_path(Cloud(), "here")


@pytest.mark.parametrize("path", ["a", "/a/b", "C:/a", "a:b", "./s3:/x", "a/s3://x", pathlib.Path("~/x")])
def test_paths(path):
    assert local_path(path, "here") == pathlib.Path(path)


@pytest.mark.parametrize("path", ["", None, 3, "a\0b", b"a"])
def test_what_is_no_path(path):
    with pytest.raises(ArgumentError, match="is no path"):
        local_path(path, "here")


def from_store(train_step, state):
    """Every call that takes a path, by name."""
    address = "s3://bucket/x"
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    calls = {
        "save": lambda: fa.save(address, state),
        "save_async": lambda: fa.save_async(address, state),
        "restore": lambda: fa.restore(address, like=state),
        "resume_or_init": lambda: fa.resume_or_init(address, train_step),
        "checkpoints": lambda: fa.checkpoint.checkpoints(address),
        "latest": lambda: fa.checkpoint.latest(address),
        "save_on_main": lambda: fa.checkpoint.save_on_main({}, address),
        "adopt": lambda: fa.interchange.adopt(address, like=state),
        "export_hf": lambda: fa.interchange.export_hf(address, state),
        "export_hf of a path": lambda: fa.interchange.export_hf("out", address),
        "export_adapter": lambda: fa.interchange.export_adapter(address, state),
        "load": lambda: fa.big.load(model, address),
        "load folder": lambda: fa.big.load(model, "x.pt", folder=address),
        "dispatch": lambda: fa.big.dispatch(model, {"": "disk"}, folder=address),
        "offload": lambda: fa.big.offload(model, device="cpu", home="disk", folder=address),
        "save_quantized": lambda: fa.big.save_quantized(address, fa.big.quantize(model, fa.big.Int8())),
        "profile": lambda: fa.profile(address),
        "write_report": lambda: fa.seeing.write_report("x.jsonl", address),
        "write_report of": lambda: fa.seeing.write_report(address, "x.html"),
        "read_jsonl": lambda: fa.track.read_jsonl(address),
        "JsonlTracker": lambda: fa.track.JsonlTracker(address),
        "ReportTracker": lambda: fa.seeing.ReportTracker(address),
        "tracked": lambda: fa.tracked(fa.Tracking("jsonl", directory=address)).__enter__(),
        "deepspeed": lambda: fa.deepspeed(stage=3, offload_params="nvme", nvme_path=address),
        "from_yaml": lambda: fa.config.from_yaml(f"checkpoint: {{directory: '{address}'}}"),
        "from_yaml report": lambda: fa.config.from_yaml(f"tracking: {{report: '{address}'}}"),
        "from_yaml profile": lambda: fa.config.from_yaml(f"tracking: {{profile: '{address}'}}"),
        "from_yaml tee": lambda: fa.config.from_yaml(f"launch: {{tee: '{address}'}}"),
    }
    shards = fa.shard([{"x": torch.ones(1)}])

    calls |= {
        "scan save": lambda: fa.scan(train_step, state, shards, save=address),
        "scan report": lambda: fa.scan(train_step, state, shards, track=fa.Tracking(report=address)),
        "Tracking": lambda: fa.Tracking(directory=address),
        "Watch": lambda: fa.Watch(profile=address),
    }
    for name in (
        "aim",
        "clearml",
        "comet",
        "dvclive",
        "jsonl",
        "mlflow",
        "swanlab",
        "tensorboard",
        "trackio",
        "wandb",
    ):
        calls[name] = lambda name=name: fa.track.of(name, directory=address)
    return calls


def test_every_call_that_takes_a_path_refuses_an_address():
    with fa.start(device="cpu"):
        train_step = program()
        state = train_step.init()
        for call in from_store(train_step, state).values():
            with pytest.raises(ArgumentError, match=r"'s3://bucket/x' is an address"):
                call()
        assert fa.save("runs/a", state).name == "step-0000000000", "the state is live"


@pytest.mark.parametrize(
    "command",
    [
        "report s3://bucket/x", "report x.jsonl -o s3://bucket/x", "inspect s3://bucket/x", "convert s3://bucket/x out",
        "convert x s3://bucket/x", "trace summarize s3://bucket/x", "config import s3://bucket/x",
        "config validate s3://bucket/x", "config -o s3://bucket/x", "launch --tee s3://bucket/x --cpu t.py",
        "launch --set checkpoint.directory=s3://bucket/x --cpu t.py", "launch --config s3://bucket/x t.py",
        "test --folder s3://bucket/x",
    ],
)  # fmt: skip
def test_every_option_refuses_an_address(command, capfd):
    assert main(command.split()) == 2
    assert "'s3://bucket/x' is an address" in capfd.readouterr().err


# -- what a page may replace -----------------------------------------------------------------------------------------


def strange(kind, path):
    """Something at a path that is no regular file, and what a message calls it."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        path.symlink_to(path.name)
    return {"folder": "a folder", "loop": "a link that leads to itself"}.get(kind, "no regular file")


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "loop"])
def test_what_is_no_regular_file_stays(tmp_path, kind, capfd):
    log, page = tmp_path / "a.jsonl", tmp_path / "page.html"
    tracker = fa.track.JsonlTracker(log)
    tracker.start({})
    tracker.log(1, {"loss": 1.0})
    tracker.finish()
    words = strange(kind, page)
    before = os.lstat(page)
    commands = {
        "report": ["report", str(log), "-o", str(page)],
        "config": ["config", "-o", str(page), "--overwrite", "--answers", "answers.yaml"],
    }
    (tmp_path / "answers.yaml").write_text("{}")
    for command in commands.values():
        assert main(command) == 2
        assert re.search(rf"page.html is {words}[^\0]*where: fnaccel", capfd.readouterr().err)
    with fa.start(device="cpu"):
        train_step = program()
        with pytest.raises(ArgumentError, match=words):
            fa.scan(
                train_step,
                train_step.init(),
                fa.shard([{"x": torch.ones(1)}]),
                track=fa.Tracking(report=page),
            )
        strange(kind, tmp_path / "log.jsonl")
        with pytest.raises(ArgumentError, match=words):
            fa.seeing.ReportTracker(tmp_path / "log.html")
        with pytest.raises((ArgumentError, fa.errors.CheckpointError), match=r"page\.html"):
            fa.checkpoint.save_on_main({}, page, overwrite=True)
    after = os.lstat(page)
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)


def test_links_are_followed_and_a_regular_file_is_replaced(tmp_path):
    log = tmp_path / "a.jsonl"
    log.write_text('{"step": 1, "time": 1.0, "loss": 1.0}\n')
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "page.html").symlink_to("old.html")
    assert fa.seeing.write_report(log, tmp_path / "page.html") == tmp_path / "page.html"
    assert (tmp_path / "page.html").is_symlink()
    assert "<html" in (tmp_path / "old.html").read_text()
    assert output_file("new/a.html", "here") == pathlib.Path("new/a.html").absolute()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "old.html", "page.html"]


def test_a_folder_that_cannot_be_made_is_an_error_by_name(tmp_path, capfd):
    log = tmp_path / "a.jsonl"
    log.write_text('{"step": 1, "time": 1.0, "loss": 1.0}\n')
    assert main(["report", str(log), "-o", str(log / "inner" / "page.html")]) == 2
    said = capfd.readouterr().err
    assert said.startswith("ArgumentError: ")
    assert "can't be written: Not a directory" in said


def test_the_output_of_ranks_goes_into_no_pipe(tmp_path):
    from fnaccel.launch.tee import start_copiers

    os.mkfifo(tmp_path / "rank0.log")
    with pytest.raises(ArgumentError, match="no regular file"):
        start_copiers(str(tmp_path), [0])
