"""Manifests as objects of Kubeflow's own packages: kubeflow-training (PyTorchJob), kubeflow-trainer-api (TrainJob)."""

from __future__ import annotations

import shlex

import attrs
import pytest
import yaml

from fnaccel.cli.launch import read_order
from fnaccel.launch.carrier import plan

training = pytest.importorskip("kubeflow.training", reason="make test-services installs kubeflow-training")
api = pytest.importorskip("kubeflow_trainer_api", reason="make test-services installs kubeflow-trainer-api")

pytestmark = pytest.mark.filterwarnings("ignore")

MORE = """
launch:
  kubernetes:
    image: me/train:1
    name: gpt
    namespace: ml
    labels: {team: a}
    annotations: {note: b}
    service_account: trainer
    node_selector: {gpu: h100}
    tolerations: [{key: gpu, operator: Exists}]
    volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
    volume_mounts: [{name: data, mountPath: /data}]
    backoff_limit: 4
"""


def manifest(tmp_path, line, recipe):
    (tmp_path / "r.yaml").write_text(recipe)
    order = read_order(["--config", str(tmp_path / "r.yaml"), *shlex.split(line)])
    return yaml.safe_load(plan(attrs.evolve(order.request, environ={}), order.carrier).output)


class Response:
    """What the deserializer of kubeflow-training reads."""

    def __init__(self, data):
        import json

        self.data = json.dumps(data)


def unknown(data, model, path=""):
    """Keys of `data` that the model of an object does not have."""
    found = []
    names = set(model.attribute_map.values())
    for key, value in data.items():
        if key not in names:
            found.append(f"{path}.{key}")
            continue
        field = next(field for field, name in model.attribute_map.items() if name == key)
        inner = getattr(model, field)
        for one, each in zip(*pairs(value, inner), strict=True):
            if hasattr(each, "attribute_map"):
                found += unknown(one, each, f"{path}.{key}")
    return found


def pairs(value, inner):
    if isinstance(value, list):
        return value, inner
    if isinstance(inner, dict):
        return list(value.values()), list(inner.values())
    return [value], [inner]


@pytest.mark.parametrize(
    "line", ["-n 8 --nnodes 3 --max-restarts 2 --env A=1 t.py --lr 1", "-n 8 t.py", "--cpu -m pkg"]
)
def test_a_pytorch_job_is_an_object_of_kubeflow(tmp_path, line):
    data = manifest(tmp_path, line, MORE)
    client = training.api_client.ApiClient() if hasattr(training, "api_client") else training.ApiClient()
    job = client.deserialize(Response(data), "KubeflowOrgV1PyTorchJob")
    assert unknown(data, job) == []
    replicas = job.spec.pytorch_replica_specs
    assert sum(one.replicas for one in replicas.values()) == (3 if "--nnodes" in line else 1)
    assert replicas["Master"].template.spec.containers[0].name == "pytorch"


@pytest.mark.parametrize("line", ["-n 8 --nnodes 3 --env A=1 t.py", "--cpu -m pkg"])
def test_a_train_job_is_an_object_of_kubeflow(tmp_path, line):
    from kubeflow_trainer_api import models

    recipe = "launch: {kubernetes: {kind: TrainJob, image: i, name: gpt, namespace: ml, labels: {team: a}}}"
    data = manifest(tmp_path, line, recipe)
    job = models.TrainerV1alpha1TrainJob.from_dict(data)
    assert job.to_dict() == data, "nothing was unknown, and nothing was lost"
