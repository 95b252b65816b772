"""The jobs of other launchers in examples/jobs: their command lines are read by ours, and Ray's script runs one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from fnaccel.cli.launch import read_order
from tests.docs.names import ROOT

JOBS = ROOT / "examples" / "jobs"


def pods_of(name):
    """(pods, container) of a manifest."""
    manifest = yaml.safe_load((JOBS / f"{name}.yaml").read_text())
    spec = manifest["spec"]
    if manifest["kind"] == "TrainJob":
        trainer = spec["trainer"]
        return trainer["numNodes"], {**trainer, "resources": trainer["resourcesPerNode"]}
    kinds = spec["pytorchReplicaSpecs"]
    assert kinds["Master"]["template"] == kinds["Worker"]["template"]
    (container,) = kinds["Worker"]["template"]["spec"]["containers"]
    return sum(kind["replicas"] for kind in kinds.values()), container


@pytest.mark.parametrize("name", ["pytorch_job", "train_job"])
def test_each_pod_runs_a_launcher_of_as_many_machines(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    pods, container = pods_of(name)
    assert container["command"] == ["fnaccel", "launch"]
    numbers = {"$(RANK)": "1", "$(PET_NODE_RANK)": "1", "$(PET_MASTER_ADDR)": "gpt-master-0"}
    order = read_order([numbers.get(word, word) for word in container["args"]])
    job = order.request.job
    assert (order.carrier, job.machines, job.machine, job.address) == ("elastic", pods, 1, "gpt-master-0")
    assert job.ranks == container["resources"]["limits"]["nvidia.com/gpu"]
    assert job.overrides == {"strategy": "fsdp", "precision": "bf16"}
    assert (job.script, job.args) == ("train.py", ("--steps", "1000"))


RAY = """
class Record:
    def __init__(self, *args, **values):
        self.args, self.values = args, values
class FailureConfig(Record): pass
class RunConfig(Record): pass
class ScalingConfig(Record): pass
class TorchConfig(Record): pass
class TorchTrainer(Record):
    def fit(self):
        import json
        print(json.dumps([self.values["torch_config"].values, self.values["scaling_config"].values]))
        self.args[0]()
def init(): pass
"""


@pytest.mark.long
def test_ray_runs_the_script_on_its_workers(tmp_path):
    for place in ("ray", "ray/train", "ray/train/torch"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "__init__.py").write_text(RAY)
    (tmp_path / "train.py").write_text(
        "import sys, fnaccel as fa\nprint(sys.argv, fa.config.recipe().strategy)"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "FNACCEL_SET": "strategy=fsdp"}
    done = subprocess.run(
        [sys.executable, str(JOBS / "ray_job.py"), "4", "train.py", "--lr", "it's"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    configs, said = done.stdout.splitlines()
    assert json.loads(configs) == [{"backend": "gloo"}, {"num_workers": 4, "use_gpu": False}]
    assert said == "['train.py', '--lr', \"it's\"] fsdp"
