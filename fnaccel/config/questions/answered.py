"""The recipe of the answers to `fnaccel config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fnaccel.config.questions.catalogue import Answers, on_cpu
from fnaccel.config.questions.question import Machine
from fnaccel.config.recipes import CheckpointRecipe, Recipe, RunRecipe, TrackingRecipe
from fnaccel.launch.recipe import LaunchRecipe
from fnaccel.launch.sections import HostsRecipe, SageMakerRecipe, TpuVmRecipe


def recipe_of(machine: Machine, answers: Answers) -> Recipe:
    """The recipe of all answers.

    Example:
        >>> given = {"where": "here", "ranks": 4, "strategy": "ddp", "precision": "bf16"}
        >>> recipe = recipe_of(Machine(accelerators=4), given | {"accumulate": 2, "seed": 0})
        >>> print(fa.config.to_yaml(recipe))
        strategy: ddp
        precision: bf16
        accumulate: 2
        launch:
          ranks: 4
    """
    chosen = {name: value for name, value in answers.items() if value is not None}
    fields: dict[str, Any] = {
        "strategy": _strategy_text(chosen),
        "precision": chosen["precision"],
        "accumulate": chosen["accumulate"],
        "clip_norm": chosen.get("clip_norm"),
        "compile": None if chosen.get("compile", "no") == "no" else chosen["compile"],
        "remat": chosen.get("remat", False),
        "run": RunRecipe(seed=chosen["seed"]),
        "launch": _launch(machine, chosen),
    }
    if "fp8_backend" in chosen:
        fields["fp8"] = {"backend": chosen["fp8_backend"]}
    if "checkpoints" in chosen:
        fields["checkpoint"] = CheckpointRecipe(directory=chosen["checkpoints"], every=chosen["save_every"])
    if "trackers" in chosen:
        names = [name.strip() for name in chosen["trackers"].split(",") if name.strip()]
        fields["tracking"] = TrackingRecipe(trackers=names)
    return Recipe(**fields)


def _strategy_text(given: Mapping[str, Any]) -> str:
    ranks = given.get("ranks", 1)
    name: str = given.get("strategy", "local")
    offload = given.get("offload", False)
    if name == "fsdp":
        return "fsdp(offload=True)" if offload else "fsdp"
    if name == "deepspeed":
        both = ", offload_optimizer='cpu'" if offload else ""
        return f"deepspeed(stage={given['stage']}{both})"
    texts = {
        "zero2": "fsdp(reshard_after_forward=False)",
        "hsdp": f"hsdp({given.get('machines', 1)}, {ranks})",
        "fsdp with tensor": f"fsdp * tensor({ranks})",
        "xla sharded": "xla(shard=True)",
    }
    return texts.get(name, name)


def _launch(machine: Machine, given: Mapping[str, Any]) -> LaunchRecipe:
    where = given["where"]
    fields: dict[str, Any] = {"cpu": on_cpu(machine, given)}
    if "ranks" in given:
        fields["ranks"] = given["ranks"]
    if given.get("machines", 1) > 1:
        fields["machines"] = given["machines"]
    if given.get("restarts"):
        fields["restarts"] = given["restarts"]
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "here": dict,
        "same command": lambda: {"address": given["address"]},
        "ssh": lambda: {"carrier": "ssh", "hosts": _hosts(given["hosts"])},
        "slurm": lambda: {"carrier": "slurm", "slurm": _picked(given, "partition", "time")},
        "tpu": lambda: {"tpu_vm": TpuVmRecipe(name=given["tpu_name"], zone=given["tpu_zone"])},
        "sagemaker": lambda: {
            "carrier": "sagemaker",
            "sagemaker": SageMakerRecipe(**_picked(given, "role", "instance_type", "region")),
        },
    }
    return LaunchRecipe(**fields, **sections[where]())


def _picked(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _hosts(text: str) -> HostsRecipe:
    is_file = "/" in text or text.endswith((".txt", "hostfile"))
    return HostsRecipe(file=text) if is_file else HostsRecipe(names=text)
