"""The carrier that builds a request: SageMaker. `tests/services` hands it to the package, which is not here."""

from __future__ import annotations

import json
import shlex

import attrs
import pytest

from fnaccel.cli.launch import read_order
from fnaccel.cli.main import main
from fnaccel.errors import LaunchError
from fnaccel.launch.carrier import plan
from fnaccel.launch.carriers.sagemaker import hyperparameters
from fnaccel.launch.carriers.tables import read_table


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FNACCEL_SET", raising=False)
    (tmp_path / "t.py").write_text("print('ran')")
    return tmp_path


def planned(line, recipe=""):
    from pathlib import Path

    Path("r.yaml").write_text(recipe)
    order = read_order(["--config", "r.yaml", *shlex.split(line)])
    return plan(attrs.evolve(order.request, environ={}), order.carrier)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--carrier sagemaker t.py", "a training job needs a role"),
        ("--set launch.sagemaker.role=r t.py", "no instance type"),
        ("--set launch.sagemaker.role=r --set launch.sagemaker.local=true t.py", "no container"),
        (
            "--carrier sagemaker --max-restarts 1 t.py",
            "--max-restarts can't be used with the carrier sagemaker",
        ),
        ("--carrier sagemaker -m pkg", "-m can't be used with the carrier sagemaker"),
    ],
)
def test_mistakes(line, says, capsys):
    assert main(["launch", "--dry-run", *shlex.split(line)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n  where: ") == said.count("\n  fix: ") == 1


SAGEMAKER = """
precision: bf16
launch:
  machines: 2
  env: {A: "1"}
  sagemaker:
    role: trainer
    profile: me
    region: eu-west-1
    instance_type: ml.g5.12xlarge
    job_name: gpt
    torch: 2.9.0
    transformers: 4.49.0
    python: py312
    max_run: 3600
    inputs_file: inputs.tsv
    metrics_file: metrics.tsv
    network_isolation: true
    arguments: {volume_size: 100}
"""


@pytest.fixture
def tables(folder):
    (folder / "inputs.tsv").write_text(
        "channel_name\tdata_location\ntrain\ts3://b/train\ntest\ts3://b/test\n"
    )
    (folder / "metrics.tsv").write_text("metric_name\tmetric_regex\nloss\tloss=([0-9.]+)\n")


def test_a_training_job(tables):
    data = planned("t.py --lr 0.1 --name=x", SAGEMAKER).request
    assert data["estimator"] == {
        "entry_point": "t.py",
        "source_dir": ".",
        "role": "trainer",
        "instance_type": "ml.g5.12xlarge",
        "instance_count": 2,
        "hyperparameters": {"lr": "0.1", "name": "x"},
        "environment": {
            "A": "1",
            "FNACCEL_OVERRIDES": '{"precision": "bf16", "checkpoint.directory": "/opt/ml/model"}',
        },
        "distribution": {"torch_distributed": {"enabled": True}},
        "pytorch_version": "2.9.0",
        "transformers_version": "4.49.0",
        "py_version": "py312",
        "base_job_name": "gpt",
        "max_run": 3600,
        "enable_network_isolation": True,
        "metric_definitions": [{"Name": "loss", "Regex": "loss=([0-9.]+)"}],
        "volume_size": 100,
    }
    assert data["inputs"] == {"train": "s3://b/train", "test": "s3://b/test"}
    assert data["session"] == {"profile": "me", "region": "eu-west-1"}
    json.dumps(data)


def test_spot_instances_keep_their_checkpoints(tables):
    more = (
        "--set launch.sagemaker.spot=true --set launch.sagemaker.max_wait=7200 --set launch.sagemaker.image=i"
    )
    data = planned(f"{more} t.py", SAGEMAKER).request
    estimator = data["estimator"]
    assert (estimator["use_spot_instances"], estimator["max_wait"]) == (True, 7200)
    assert estimator["checkpoint_local_path"] == "/opt/ml/checkpoints"
    assert (
        json.loads(estimator["environment"]["FNACCEL_OVERRIDES"])["checkpoint.directory"]
        == "/opt/ml/checkpoints"
    )
    assert estimator["distribution"] == {"torch_distributed": {"enabled": True}}
    assert "pytorch_version" not in estimator
    kept = planned(f"{more} --set checkpoint.directory=/opt/ml/checkpoints/a t.py", SAGEMAKER).request
    assert "checkpoints/a" in kept["estimator"]["environment"]["FNACCEL_OVERRIDES"]


@pytest.mark.parametrize(("flags", "kind"), [("--cpu", "local"), ("-n 1", "local_gpu")])
def test_local_mode(tables, flags, kind):
    estimator = planned(f"--nnodes 1 {flags} --set launch.sagemaker.local=true t.py", SAGEMAKER).request[
        "estimator"
    ]
    assert estimator["instance_type"] == kind
    assert ("distribution" in estimator) == (flags == "--cpu")


@pytest.mark.parametrize(
    "words", [["data.txt"], ["--flag"], ["--flag", "--lr", "1"], ["--a", "1", "2"], ["--a=1", "--a=2"]]
)
def test_arguments_that_sagemaker_cannot_pass(words):
    with pytest.raises(LaunchError, match="SageMaker can't pass the script's arguments"):
        hyperparameters(words)


def test_a_negative_number_is_a_value():
    assert hyperparameters(["--a", "-1", "--b=-x"]) == {"a": "-1", "b": "-x"}


@pytest.mark.parametrize("text", ["", "a\tb\n", "x\ty\n1\n", "x\ty\n1\t\n", "x\ty\n1\t2\t3\n"])
def test_tables_with_mistakes(folder, text):
    (folder / "t.tsv").write_text(text)
    with pytest.raises(LaunchError):
        read_table(folder / "t.tsv", ("x", "y"), "f")


def test_the_package_is_missing(tables, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sagemaker", None)
    monkeypatch.setitem(sys.modules, "boto3", None)
    (__import__("pathlib").Path("r.yaml")).write_text(SAGEMAKER)
    assert main(["launch", "--config", "r.yaml", "t.py"]) == 2
    assert 'pip install "sagemaker>=3"' in capsys.readouterr().err
