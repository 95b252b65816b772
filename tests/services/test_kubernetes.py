"""The manifests of examples/jobs as objects of Kubeflow's own packages: kubeflow-training (PyTorchJob), kubeflow-trainer-api (TrainJob)."""

from __future__ import annotations

import pytest
import yaml

from tests.docs.names import ROOT

training = pytest.importorskip("kubeflow.training", reason="make test-services installs kubeflow-training")
api = pytest.importorskip("kubeflow_trainer_api", reason="make test-services installs kubeflow-trainer-api")

pytestmark = pytest.mark.filterwarnings("ignore")

JOBS = ROOT / "examples" / "jobs"


def manifest(name):
    return yaml.safe_load((JOBS / f"{name}.yaml").read_text())


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


def test_a_pytorch_job_is_an_object_of_kubeflow():
    data = manifest("pytorch_job")
    client = training.api_client.ApiClient() if hasattr(training, "api_client") else training.ApiClient()
    job = client.deserialize(Response(data), "KubeflowOrgV1PyTorchJob")
    assert unknown(data, job) == []
    replicas = job.spec.pytorch_replica_specs
    assert sum(one.replicas for one in replicas.values()) == 2
    assert replicas["Master"].template.spec.containers[0].name == "pytorch"


def test_a_train_job_is_an_object_of_kubeflow():
    from kubeflow_trainer_api import models

    data = manifest("train_job")
    job = models.TrainerV1alpha1TrainJob.from_dict(data)
    assert job.to_dict() == data, "nothing was unknown, and nothing was lost"
