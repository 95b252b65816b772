"""The carrier `kubernetes`: the manifest of a Kubeflow PyTorchJob or TrainJob, as text for `kubectl apply`.

A template for each kind is filled with the keys of the section `launch.kubernetes`. Each pod runs one
launcher. Kubernetes replaces `$(NAME)` by the value of a variable. Not run on a cluster: the tests
build the objects of Kubeflow's own packages from the manifest.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import attrs
import yaml

from fnaccel.errors import LaunchError, nearest
from fnaccel.launch.carriers.command_line import options_of, program_of
from fnaccel.launch.request import Plan, Request, check_keys

# `$NAME` is a key of the section, or one of `_MADE`. Lines without a value are left out
_TEMPLATES = {
    # of the training operator, version 1. Pod 0 is the master
    "PyTorchJob": """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: $name, namespace: $namespace, labels: $labels, annotations: $annotations}
spec:
  runPolicy: {cleanPodPolicy: "None", backoffLimit: $backoff_limit}
  pytorchReplicaSpecs:
    Master: &pod
      replicas: 1
      restartPolicy: OnFailure
      template:
        metadata: {labels: $labels, annotations: $annotations}
        spec:
          containers:
          - name: pytorch
            image: $image
            command: [fnaccel, launch]
            args: $args
            env: $env
            resources: $resources
            workingDir: $folder
            volumeMounts: $volume_mounts
          serviceAccountName: $service_account
          nodeSelector: $node_selector
          tolerations: $tolerations
          volumes: $volumes
    Worker: {<<: *pod, replicas: $workers}
""",
    # of Kubeflow Trainer, version 2. The runtime of the cluster describes the pods
    "TrainJob": """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: $name, namespace: $namespace, labels: $labels, annotations: $annotations}
spec:
  runtimeRef: {name: $runtime}
  trainer:
    numNodes: $machines
    image: $image
    command: [fnaccel, launch]
    args: $args
    env: $env
    resourcesPerNode: $resources
  labels: $labels
  annotations: $annotations
""",
}
_MADE = {"args", "env", "machines", "workers"}
_PLACES = {
    "PyTorchJob": ("$(RANK)", "{name}-master-0"),
    "TrainJob": ("$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)"),
}
"""The number of a pod, and the address of pod 0."""
_ELSEWHERE = {
    "PyTorchJob": "leave it out, or kind: TrainJob",
    "TrainJob": "write them in a runtime, and name it: runtime: NAME. Or kind: PyTorchJob",
}
_KEYS = {kind: set(re.findall(r"\$(\w+)", text)) - _MADE | {"kind"} for kind, text in _TEMPLATES.items()}


def plan(request: Request) -> Plan:
    """The manifest as YAML.

    Raises:
        LaunchError: no image, an unknown key, a key of the other kind, or an unknown kind.

    Example:
        >>> text = plan(Request(job=Job(script="t.py", ranks=8, kubernetes={"image": "me/train:1"}))).output
        >>> print(text.splitlines()[2])
        kind: PyTorchJob
    """
    section = request.job.kubernetes
    check_keys(section, sorted(set().union(*_KEYS.values())), "launch.kubernetes")
    kind = str(section.get("kind", "PyTorchJob"))
    if kind not in _KEYS:
        raise LaunchError(f"kind: {kind}", where="launch.kubernetes.kind", fix=nearest(kind, list(_KEYS)))
    if not section.get("image"):
        raise LaunchError(
            "a job needs an image",
            where="launch.kubernetes",
            fix="image: one with fnaccel and your script in it",
        )
    unused = [key for key in section if key not in _KEYS[kind]]
    if unused:
        raise LaunchError(
            f"a {kind} has no {', '.join(unused)}", where="launch.kubernetes", fix=_ELSEWHERE[kind]
        )
    manifest = _filled(yaml.safe_load(_TEMPLATES[kind]), _values(request, *_PLACES[kind]))
    if kind == "PyTorchJob" and request.job.machines == 1:
        del manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    text = yaml.safe_dump(manifest, sort_keys=False, width=1_000)
    head = f"# {kind} of fnaccel launch --carrier kubernetes: kubectl apply -f FILE\n"
    return Plan(carrier="kubernetes", summary=f"a {kind}", output=head + text)


def _values(request: Request, rank: str, address: str) -> dict[str, Any]:
    """The values of a template by their names."""
    job, section = request.job, request.job.kubernetes
    name = str(section.get("name", "fnaccel"))
    address = address.format(name=name)
    options = options_of(attrs.evolve(job, machine=rank, address=address, env={}))
    options = [word if word in (rank, address) else _plain(word) for word in options]
    limits = None if job.ranks is None or job.cpu else {"limits": {"nvidia.com/gpu": job.ranks}}
    return {
        "runtime": "torch-distributed",
        "resources": limits,
        **section,
        "name": name,
        "args": [*options, *map(_plain, program_of(job))],
        "env": [{"name": name, "value": _plain(value)} for name, value in job.env.items()] or None,
        "machines": job.machines,
        "workers": job.machines - 1,
        # ranks exchange batches through shared memory, which is 64 MB in a container by default
        "volumes": [*section.get("volumes", ()), {"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "volume_mounts": [*section.get("volume_mounts", ()), {"name": "shm", "mountPath": "/dev/shm"}],
    }


def _filled(part: Any, values: Mapping[str, Any]) -> Any:
    """A part of a template with its values. Keys without a value are left out."""
    if isinstance(part, dict):
        pairs: dict[Any, Any] = {key: _filled(each, values) for key, each in part.items()}  # pyright: ignore[reportUnknownVariableType]
        return {key: each for key, each in pairs.items() if each is not None} or None
    if isinstance(part, list):
        return [_filled(each, values) for each in part]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(part, str) and part.startswith("$"):
        # a copy: YAML would write a reference to a value that comes twice
        value = copy.deepcopy(values.get(part[1:]))
        return None if value == {} else value
    return part


def _plain(word: str) -> str:
    """A word in which Kubernetes replaces nothing."""
    return word.replace("$", "$$")
