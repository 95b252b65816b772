"""The carrier `kubernetes`: the manifest of a Kubeflow PyTorchJob or TrainJob, as text for `kubectl apply`.

Each pod runs one launcher. Kubernetes writes the values of variables in the places of `$(NAME)`. Not run on a
cluster: the tests build the objects of Kubeflow's own packages from the manifest.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import attrs
import yaml

from fnaccel.errors import LaunchError, nearest
from fnaccel.launch.carriers.command_line import options_of, program_of
from fnaccel.launch.carriers.request import Plan, Request

KINDS = ("PyTorchJob", "TrainJob")
KEYS = (
    "annotations", "backoff_limit", "folder", "image", "kind", "labels", "name", "namespace", "node_selector",
    "resources", "runtime", "service_account", "tolerations", "volume_mounts", "volumes",
)  # fmt: skip
"""Keys of the section `launch.kubernetes`."""

_SHARED_MEMORY = {"name": "shm", "emptyDir": {"medium": "Memory"}}
_PLACES = {
    "PyTorchJob": ("$(RANK)", "{name}-master-0"),
    "TrainJob": ("$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)"),
}
"""The number of a pod, and the address of pod 0."""


def plan(request: Request) -> Plan:
    """The manifest as YAML.

    Raises:
        LaunchError: no image, an unknown key, or an unknown kind.

    Example:
        >>> text = plan(Request(job=Job(script="t.py", ranks=8, kubernetes={"image": "me/train:1"}))).output
        >>> print(text.splitlines()[2])
        kind: PyTorchJob
    """
    section = request.job.kubernetes
    for key in section:
        if key not in KEYS:
            raise LaunchError(f"no key {key!r}", where="launch.kubernetes", fix=nearest(key, KEYS))
    kind = section.get("kind", "PyTorchJob")
    if kind not in KINDS:
        raise LaunchError(f"kind: {kind}", where="launch.kubernetes.kind", fix=nearest(str(kind), KINDS))
    if not section.get("image"):
        raise LaunchError(
            "a job needs an image",
            where="launch.kubernetes",
            fix="image: one with fnaccel and your script in it",
        )
    manifest = pytorch_job(request) if kind == "PyTorchJob" else train_job(request)
    text = yaml.safe_dump(manifest, sort_keys=False, width=1_000)
    head = f"# {kind} of fnaccel launch --carrier kubernetes: kubectl apply -f FILE\n"
    return Plan(carrier="kubernetes", summary=f"a {kind}", output=head + text)


def pytorch_job(request: Request) -> dict[str, Any]:
    """A PyTorchJob of the training operator, version 1. Pod 0 is the master."""
    job, section = request.job, request.job.kubernetes
    spec: dict[str, Any] = {"restartPolicy": "OnFailure"}
    pod: dict[str, Any] = {"containers": [{"name": "pytorch", **_container(request)}], **_pod(section)}
    pod["volumes"] = [*section.get("volumes", ()), _SHARED_MEMORY]
    mounts = [*section.get("volume_mounts", ()), {"name": "shm", "mountPath": "/dev/shm"}]
    pod["containers"][0]["volumeMounts"] = mounts
    template = {"metadata": _labels(section), "spec": pod} if _labels(section) else {"spec": pod}
    replicas = {"Master": {"replicas": 1, **spec, "template": template}}
    if job.machines > 1:
        # a copy: YAML would write a reference to the other one
        replicas["Worker"] = {"replicas": job.machines - 1, **spec, "template": copy.deepcopy(template)}
    policy: dict[str, Any] = {"cleanPodPolicy": "None"}
    if "backoff_limit" in section:
        policy["backoffLimit"] = section["backoff_limit"]
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(section),
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": replicas},
    }


def train_job(request: Request) -> dict[str, Any]:
    """A TrainJob of Kubeflow Trainer, version 2. The cluster's runtime describes the pods."""
    job, section = request.job, request.job.kubernetes
    container = _container(request)
    resources = container.pop("resources", None)
    container.pop("workingDir", None)
    trainer: dict[str, Any] = {"numNodes": job.machines, **container}
    if resources is not None:
        trainer["resourcesPerNode"] = resources
    unused = [key for key in ("volumes", "volume_mounts", "node_selector", "tolerations") if key in section]
    if unused:
        raise LaunchError(
            f"a TrainJob has no {', '.join(unused)}",
            where="launch.kubernetes",
            fix="write them in a runtime, and name it: runtime: NAME. Or kind: PyTorchJob",
        )
    spec: dict[str, Any] = {
        "runtimeRef": {"name": section.get("runtime", "torch-distributed")},
        "trainer": trainer,
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(section),
        "spec": {**spec, **_labels(section)},
    }


def _container(request: Request) -> dict[str, Any]:
    job, section = request.job, request.job.kubernetes
    rank, address = _PLACES[section.get("kind", "PyTorchJob")]
    address = address.format(name=_name(section))
    options = options_of(attrs.evolve(job, machine=rank, address=address, env={}))
    options = [word if word in (rank, address) else word.replace("$", "$$") for word in options]
    words = ["fnaccel", "launch", *options, *_plain(program_of(job))]
    container: dict[str, Any] = {"image": section["image"], "command": words[:2], "args": words[2:]}
    if job.env:
        values = zip(job.env, _plain(list(job.env.values())), strict=True)
        container["env"] = [{"name": name, "value": value} for name, value in values]
    resources = section.get("resources")
    if resources is None and job.ranks is not None and not job.cpu:
        resources = {"limits": {"nvidia.com/gpu": job.ranks}}
    if resources is not None:
        container["resources"] = resources
    if "folder" in section:
        container["workingDir"] = section["folder"]
    return container


def _plain(words: list[str]) -> list[str]:
    """Words in which Kubernetes replaces nothing."""
    return [word.replace("$", "$$") for word in words]


def _name(section: Mapping[str, Any]) -> str:
    return str(section.get("name", "fnaccel"))


def _metadata(section: Mapping[str, Any]) -> dict[str, Any]:
    place = {"namespace": section["namespace"]} if "namespace" in section else {}
    return {"name": _name(section), **place, **_labels(section)}


def _labels(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: dict(section[key]) for key in ("labels", "annotations") if section.get(key)}


def _pod(section: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "service_account": "serviceAccountName",
        "node_selector": "nodeSelector",
        "tolerations": "tolerations",
    }
    return {theirs: section[ours] for ours, theirs in names.items() if ours in section}
