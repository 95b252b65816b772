"""Training jobs by the sagemaker package, version 3, against moto: no account, no network."""

from __future__ import annotations

import json

import pytest

boto3 = pytest.importorskip("boto3", reason="make test-services installs sagemaker")
moto = pytest.importorskip("moto", reason="make test-services installs moto")

from fnaccel.cli.main import main  # noqa: E402

# the packages and moto warn about themselves
pytestmark = pytest.mark.filterwarnings("ignore")

RECIPE = """
strategy: fsdp
launch:
  machines: 2
  sagemaker:
    role: trainer
    region: us-east-1
    instance_type: ml.g5.12xlarge
    job_name: gpt
    {container}
    spot: true
    max_run: 3600
    max_wait: 7200
    inputs_file: inputs.tsv
    metrics_file: metrics.tsv
    network_isolation: true
    arguments: {{volume_size: 100}}
"""
IMAGE = "image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1"
VERSIONS = "torch: 2.9.0\n    transformers: 5.3.0\n    python: py312"


@pytest.fixture
def account(tmp_path, monkeypatch):
    """An account of moto, and the requests of CreateTrainingJob that it got."""
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("FNACCEL_SET", raising=False)
    (tmp_path / "t.py").write_text("print('ran')")
    (tmp_path / "inputs.tsv").write_text("channel_name\tdata_location\ntrain\ts3://b/train\n")
    (tmp_path / "metrics.tsv").write_text("metric_name\tmetric_regex\nloss\tloss=([0-9.]+)\n")
    import botocore.client

    requests, call = [], botocore.client.BaseClient._make_api_call

    def record(client, operation, arguments):
        if operation == "CreateTrainingJob":
            requests.append(arguments)
            raise RecordedError
        if operation == "SimulatePrincipalPolicy":
            return {"EvaluationResults": [{"EvalDecision": "allowed"}]}
        return call(client, operation, arguments)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", record)
    with moto.mock_aws():
        boto3.client("iam").create_role(RoleName="trainer", AssumeRolePolicyDocument="{}")
        yield requests


class RecordedError(Exception):
    """The request has come: there is no service that would take it."""


def valid(request):
    """Check a request by the service's own description."""
    from botocore.validate import ParamValidator

    shape = boto3.client("sagemaker").meta.service_model.operation_model("CreateTrainingJob").input_shape
    report = ParamValidator().validate(request, shape)
    assert not report.has_errors(), report.generate_report()


@pytest.mark.parametrize("container", [IMAGE, VERSIONS], ids=["image", "versions"])
def test_a_training_job_reaches_the_service(account, tmp_path, container):
    (tmp_path / "r.yaml").write_text(RECIPE.format(container=container))
    with pytest.raises(RecordedError):
        main(["launch", "--config", "r.yaml", "t.py", "--lr", "0.1"])
    (request,) = account
    valid(request)
    assert request["TrainingJobName"].startswith("gpt")
    assert request["RoleArn"] == "arn:aws:iam::123456789012:role/trainer"
    image = request["AlgorithmSpecification"]["TrainingImage"]
    assert ("train:1" in image) == (container == IMAGE)
    assert ("huggingface-pytorch-training:2.9.0-transformers5.3.0" in image) == (container == VERSIONS)
    assert request["AlgorithmSpecification"]["MetricDefinitions"] == [
        {"Name": "loss", "Regex": "loss=([0-9.]+)"}
    ]
    compute = request["ResourceConfig"]
    assert (compute["InstanceType"], compute["InstanceCount"], compute["VolumeSizeInGB"]) == (
        "ml.g5.12xlarge",
        2,
        100,
    )
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200}
    assert request["EnableManagedSpotTraining"] is True
    assert request["EnableNetworkIsolation"] is True
    place = request["CheckpointConfig"]
    assert place["LocalPath"] == "/opt/ml/checkpoints"
    assert place["S3Uri"].endswith("/gpt/checkpoints")
    channels = {
        one["ChannelName"]: one["DataSource"]["S3DataSource"]["S3Uri"] for one in request["InputDataConfig"]
    }
    assert channels["train"] == "s3://b/train"
    assert json.loads(request["HyperParameters"]["lr"]) in ("0.1", 0.1)
    overrides = json.loads(request["Environment"]["FNACCEL_OVERRIDES"])
    assert overrides == {"strategy": "fsdp", "checkpoint.directory": "/opt/ml/checkpoints"}
