"""The parts of the package that a copy may lack, and what says so when one is used: see docs/design.md.

`python -m tests.surface.tenants` prints what they import from the core beside what is public.
"""

from __future__ import annotations

import ast
import shutil
from collections import Counter
from pathlib import Path

from tests.surface.structure import FILES, PACKAGE, imports, name_of

TENANTS = {
    "aim": ["track/aim.py"],
    "background compilation": ["transforms/background"],
    "big": ["big", "cli/inspect.py"],
    "captured steps": [
        "program/captured_step.py", "program/step_graph.py", "strategies/fsdp_captured.py", "strategies/fsdp_regather.py",
    ],
    "carriers": ["launch/carriers"],
    "clearml": ["track/clearml.py"],
    "comet": ["track/comet.py"],
    "context": ["strategies/context"],
    "convert": ["cli/convert.py", "interchange/converting.py"],
    "deepspeed": ["strategies/deepspeed"],
    "dvclive": ["track/dvclive.py"],
    "estimate": ["estimate", "cli/estimate.py"],
    "first losses": ["transforms/first_loss"],
    "float8": ["transforms/float8"],
    "importing": ["config/importing", "cli/config/importing.py"],
    "interchange": ["interchange"],
    "machines": ["launch/coordinator.py", "launch/elastic.py", "launch/rendezvous.py", "launch/same_job.py", "launch/store.py"],
    "mixtures": ["data/mixing.py"],
    "mlflow": ["track/mlflow.py"],
    "momentum teacher": ["transforms/teachers.py"],
    "optimizers of DeepSpeed": ["optim/deepspeed.py"],
    "optimizers in 8 bits": ["optim/quantized.py"],
    "pipelines": ["strategies/pipeline"],
    "quantize": ["big/quantize"],
    "products": ["transforms/products"],
    "questions": ["config/questions", "cli/config/ask.py"],
    "reports": ["seeing/report.py", "seeing/report_page.py", "seeing/line_chart.py", "seeing/runs.py", "cli/report.py"],
    "replicas": ["strategies/replicas"],
    "self test": ["cli/test.py", "cli/selftest"],
    "swanlab": ["track/swanlab.py"],
    "tensor": ["strategies/tensor"],
    "tensorboard": ["track/tensorboard.py"],
    "trackio": ["track/trackio.py"],
    "wandb": ["track/wandb.py"],
    "waiting activations": ["transforms/waiting"],
    "xla": ["strategies/xla"],
}  # fmt: skip
"""Files and folders of the package, by the name of what they do."""

USES = {
    "aim": "fa.track.AimTracker",
    "background compilation": "train(fa.compile(loss_fn, background=True), 'local')",
    "big": "fa.big.empty",
    "captured steps": "train(fa.compile(loss_fn, scope='step', backend='eager'), 'local')",
    "clearml": "fa.track.of('clearml')",
    "comet": "fa.track.CometTracker",
    "context": "fa.context",
    "deepspeed": "fa.strategy('deepspeed_zero2')",
    "dvclive": "fa.track.DVCLiveTracker",
    "estimate": "fa.estimate.training",
    "float8": "fa.with_precision(loss_fn, 'fp8')",
    "importing": "fa.config.import_document",
    "interchange": "fa.interchange.export_hf",
    "mixtures": "fa.data.mix",
    "mlflow": "fa.track.MLflowTracker",
    "momentum teacher": "fa.transforms.momentum_teacher",
    "optimizers of DeepSpeed": "fa.optim.from_deepspeed",
    "optimizers in 8 bits": "fa.optim.adamw8bit",
    "pipelines": "fa.strategy('pipeline(2)')",
    "replicas": "fa.strategy('local_sgd(2)')",
    "reports": "fa.Tracking(report='page.html').opened('here')",
    "swanlab": "fa.track.SwanLabTracker",
    "tensor": "fa.strategy('fsdp(2) * tensor(2)')",
    "tensorboard": "fa.Tracking('tensorboard').opened('here')",
    "trackio": "fa.track.TrackioTracker",
    "wandb": "fa.track.WandbTracker",
    "waiting activations": "train(fa.remat(loss_fn, save='offload'), 'local')",
    "xla": "fa.xla",
}
"""A use of some of them, in Python."""

COMMANDS = {
    "carriers": "launch --carrier slurm --cpu launched.py", "convert": "convert a b", "estimate": "estimate gpt2", "importing": "config import a.yaml",
    "machines": "launch --cpu --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 launched.py", "questions": "config", "reports": "report a.jsonl", "self test": "test", "big": "inspect a",
}  # fmt: skip
"""A use of some of them, on the command line."""

SCRIPT = """\
import torch
import fnaccel as fa
from fnaccel.errors import MissingBackendError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loss_fn(model, batch):
    x, y = batch
    return fa.Mean(((model(x) - y) ** 2).sum(), weight=len(x))


def train(step, strategy):
    model = fa.distribute(lambda: nn.Linear(2, 1), strategy)
    train_step = fa.train_step(step, model=model, optimizer=fa.adamw(0.1))
    state = train_step.init(seed=0)
    shards = fa.shard(DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4))
    for state, metrics in fa.scan(train_step, state, shards, steps=3, save="run", track="jsonl"):
        pass
    state = fa.restore("run", like=train_step.init(seed=1))
    assert state.step == 3 and float(metrics["loss"]) < 3.0
    train_step.close()


with fa.start(device="cpu"):
    for strategy in ("local", "ddp", "fsdp"):
        step = fa.clip_norm(fa.with_precision(fa.accumulate(loss_fn, 2), "bf16"), 1.0)
        train(step, strategy)
        __import__("shutil").rmtree("run")
    for use in USES:
        try:
            eval(use)
        except MissingBackendError as error:
            print(error.what)
        else:
            raise AssertionError(use + " did not raise")
"""


def copy_without(names: list[str], folder: Path) -> Path:
    """A copy of the package in a folder, without some tenants."""
    shutil.copytree(PACKAGE, folder / "fnaccel", ignore=shutil.ignore_patterns("__pycache__"))
    for path in {path for name in names for path in TENANTS[name]}:
        place = folder / "fnaccel" / path
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
    return folder


PUBLIC = {"fnaccel", "fnaccel.errors", "fnaccel.extend", "fnaccel.tree"}
"""Modules that tenants may import from as users do."""


def files_of_tenants():
    """Each file of a tenant, with the name of the tenant."""
    named = {PACKAGE / path: name for name, paths in TENANTS.items() for path in paths}
    return {
        path: next(named[place] for place in (path, *path.parents) if place in named)
        for path in FILES
        if named.keys() & {path, *path.parents}
    }


def core_names():
    """What tenants import from the core beside what is public: names, with the number of tenants each."""
    files = files_of_tenants()
    own = {f"fnaccel.{name_of(path)}" for path in files}
    found = {
        (f"{module}.{name}", tenant)
        for path, tenant in files.items()
        for module, names in imports(path)
        for name in names
        if module.startswith("fnaccel") and not {module, f"{module}.{name}"} & (own | PUBLIC)
    }
    return Counter(name for name, _ in found)


OTHERS = ("*.pyi", "*.js", "*.css", "*.html", "*.json", "*.yaml", "*.j2", "*.txt")


def mass():
    """(lines of the package, templates and stubs included; statements of its Python)."""
    trees = [ast.parse(path.read_text()) for path in FILES]
    texts = [path for kind in OTHERS for path in PACKAGE.rglob(kind)]
    lines = sum(len(path.read_text(errors="replace").splitlines()) for path in [*FILES, *texts])
    return lines, sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))


def main():
    for name, tenants in sorted(core_names().items()):
        print(f"{tenants:3} {name}")
    lines, statements = mass()
    print(
        f"{len(core_names())} names of the core that tenants import; {lines} lines, {statements} statements"
    )


if __name__ == "__main__":
    main()
