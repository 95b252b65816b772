"""A user's script without mistakes, one with a mistake in each line, and what pyright reports about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RIGHT = """\
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import assert_type

import fnaccel as fa
from fnaccel import *


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> fa.Mean:
    return fa.Mean(model(batch["x"]).square().sum(), weight=len(batch["x"]))


def make() -> nn.Module:
    return nn.Linear(4, 1)


fa.strategies.Strategy((*fa.fsdp().axes, *fa.ddp(2).axes))
strategy_ = fa.ddp(2, hook="bf16") * fa.fsdp(4, units=("Block",), init="meta", reshard_after_forward=False)
assert_type(strategy_, fa.strategies.Strategy)
fa.fsdp(units=lambda name, module: name == "a"), fa.fsdp(units=["Block"]), fa.fsdp(units=1_000), fa.fsdp(units="Block")
fa.hsdp(2, 4, offload=True), fa.local(), fa.tensor(2, "auto"), fa.context(method="ring"), fa.xla(shard=2)
fa.deepspeed(2, offload_optimizer="cpu", config={"zero_optimization": {"reduce_bucket_size": "auto"}})

optimizer = fa.adamw(fa.warmup_cosine(3e-4, warmup=10, total=100), weight_decay=0.1, groups={"*bias": {"lr": 0.1}})
assert_type(optimizer, fa.optim.Optimizer)
fa.sgd(0.1, momentum=0.9), fa.adam(0.1, betas=(0.9, 0.95)), fa.optim.adafactor(1e-2, weight_decay=0.1)
fa.optim.adamw8bit(1e-3, codes="4bit"), fa.optim.from_torch(torch.optim.RMSprop, lr=1e-3, alpha=0.9)
fa.optim.from_deepspeed(1e-3, weight_decay=0.1)

with fa.start(device="cpu") as world:
    train_step_ = fa.train_step(loss_fn, model=fa.distribute(make, strategy_), optimizer=optimizer, rng="stream")
    assert_type(train_step_, fa.TrainStep)
    state = train_step_.init(seed=1)
    assert_type(state, fa.TrainState)
    for state, metrics in fa.scan(train_step_, state, fa.shard([1, 2], remainder="drop"), steps=10):
        print(state.step, metrics["loss"])
    assert_type(fa.restore("runs", like=state), fa.TrainState)
    assert_type(fa.restore("runs", like={"weight": torch.ones(2)}, only="weight"), dict[str, torch.Tensor])
    assert_type(fa.interchange.adopt("model.safetensors", like=state, format="safetensors"), fa.TrainState)
    assert_type(fa.resume_or_init("runs", train_step_), fa.TrainState)
    assert_type(fa.snapshot(state), fa.TrainState)
    assert_type(fa.gather(torch.ones(2)), torch.Tensor)
    assert_type(fa.reduce({"loss": torch.ones(2)}, "mean"), dict[str, torch.Tensor])
    assert_type(fa.broadcast([torch.ones(2)]), list[torch.Tensor])
    assert_type(fa.pad_across_processes(torch.ones(2)), torch.Tensor)
    fa.save("runs", state, keep=2)
    fa.checkpoint.latest("runs")

    @world.on_main
    def tell(text: str) -> int:
        return len(text)

    assert_type(tell("done"), int | None)

fa.transforms.Precision(compute="bf16", reduce=torch.float32)
fa.strategies.powersgd(wrap="fp16", batched=True)
fa.seeing.get_logger(level="INFO")
fa.profile("runs", activities=["cpu", "cuda"])
fa.big.sizes(make(), "int8"), fa.big.load(make(), "model.safetensors", dtype="stored"), fa.big.Nf4(compute="bf16")
assert_type(fa.debug_launch(len, ("ab",)), list[int])
recipe: fa.config.Recipe = fa.config.from_yaml("run.yaml")
fa.config.apply(recipe, loss_fn, make)
fa.tree.map(torch.clone, state.params)

# names of `from fnaccel import *`
save("runs", state)
adamw(0.1), checkpoint.latest("runs"), optim.Optimizer, TrainState, World


class Floats:
    def start(self, config: Mapping[str, Any]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


class Urgent(Floats):
    def log(self, step: int, metrics: Mapping[str, float], *, urgent: bool = False) -> None: ...


with fa.tracked(fa.Tracking("jsonl", Floats(), Urgent(), config={"lr": 0.1})) as run:
    run.log(1, {"loss": torch.tensor(0.5), "note": "warm"}, options={"Urgent": {"urgent": True}})
    run.log({"eval": {"loss": 0.5}})
    mine: fa.track.Tracker = run
"""

START = """\
import torch
import fnaccel as fa
from fnaccel import *

def loss_fn(model: object, batch: object) -> fa.Mean:
    return fa.Mean(torch.ones(()), weight=1)

train_step_ = fa.train_step(loss_fn, model=fa.distribute(torch.nn.Identity, "local"), optimizer=fa.sgd(0.1))
state = train_step_.init()
tensor_ = torch.ones(2)
recipe = fa.config.Recipe()
"""
"""The first lines of the script with mistakes. They are right."""

ATTRIBUTE, CALL, ARGUMENT = "reportAttributeAccessIssue", "reportCallIssue", "reportArgumentType"
MISTAKES = {
    "fa.nonsense": ATTRIBUTE,
    "fa.config.nonsense": ATTRIBUTE,
    "fa.optim.nonsense": ATTRIBUTE,
    "from fnaccel import nonsense": ATTRIBUTE,
    "importlib": "reportUndefinedVariable",
    "sys": "reportUndefinedVariable",
    "Any": "reportUndefinedVariable",
    "fa.fsdp(typo=1)": CALL,
    "fa.fsdp(init=3)": ARGUMENT,
    "fa.fsdp(offload='cpu')": ARGUMENT,
    "fa.fsdp(units=1.5)": ARGUMENT,
    "fa.hsdp(2, typo=1)": CALL,
    "fa.ddp(degre=2)": CALL,
    "fa.ddp('2')": ARGUMENT,
    "fa.local(2)": CALL,
    "fa.distribute(3, 'local')": ARGUMENT,
    "fa.distribute({'model': 3})": ARGUMENT,
    "fa.train_step(loss_fn, model=fa.distribute(torch.nn.Identity), optimizer=torch.optim.SGD)": ARGUMENT,
    "fa.train_step(loss_fn, model=torch.nn.Identity(), optimizer=fa.sgd(0.1))": ARGUMENT,
    "fa.config.Recipe(precision='bf17')": ARGUMENT,
    "fa.config.Recipe(compile='blocks')": ARGUMENT,
    "fa.config.DataRecipe(remainder='dropped')": ARGUMENT,
    "fa.tensor(plann='auto')": CALL,
    "fa.context(method='circle')": ARGUMENT,
    "fa.deepspeed(stag=2)": CALL,
    "fa.deepspeed(offload_optimizer='disk')": ARGUMENT,
    "fa.xla(sharded=True)": CALL,
    "fa.strategies.powersgd(wrap='fp8')": ARGUMENT,
    "fa.strategies.powersgd(matrix_rank=2)": CALL,
    "fa.sgd(0.1, momemtum=0.9)": CALL,
    "fa.adam(0.1, beta=(0.9, 0.9))": CALL,
    "fa.adamw(0.1, weigth_decay=0.1)": CALL,
    "fa.adamw('fast')": ARGUMENT,
    "fa.optim.adafactor(weigth_decay=0.1)": CALL,
    "fa.optim.adamw8bit(0.1, codes='2bit')": ARGUMENT,
    "fa.train_step(loss_fn, model=fa.distribute(torch.nn.Identity, 'local'), optimizer=fa.sgd(0.1), rng='none')": ARGUMENT,
    "fa.shard([1], remainder='keeep')": ARGUMENT,
    "fa.reduce(tensor_, 'maximum')": ARGUMENT,
    "fa.gather(tensor_).nonsense": ATTRIBUTE,
    "state.nonsense": ATTRIBUTE,
    "train_step_.nonsense": ATTRIBUTE,
    "recipe.nonsense": ATTRIBUTE,
    "fa.restore('runs', like=state).nonsense": ATTRIBUTE,
    "fa.restore('runs', like={'x': tensor_}).step": ATTRIBUTE,
    "fa.resume_or_init('runs', train_step_).nonsense": ATTRIBUTE,
    "fa.resume_or_init('runs', state)": ARGUMENT,
    "fa.snapshot(state).nonsense": ATTRIBUTE,
    "fa.interchange.adopt('x', like=state, format='zip')": ARGUMENT,
    "fa.interchange.export_hf('x', state, dtype='bf61')": ARGUMENT,
    "fa.with_precision(loss_fn, 'bf61')": ARGUMENT,
    "fa.clip_norm(train_step_, 1.0)": ARGUMENT,
    "fa.train_step(train_step_, model=fa.distribute(torch.nn.Identity), optimizer=None)": ARGUMENT,
    "fa.interchange.gather_state_dict(state, dtype='bf61')": ARGUMENT,
    "fa.optim.deepspeed_lr(0.1).nonsense": ATTRIBUTE,
    "fa.transforms.Precision(compute='bf61')": ARGUMENT,
    "fa.big.load(torch.nn.Linear(2, 2), 'x', dtype='bf61')": ARGUMENT,
    "fa.big.load(torch.nn.Linear(2, 2), 'x', format='zip')": ARGUMENT,
    "fa.big.sizes(torch.nn.Linear(2, 2), 'int5')": ARGUMENT,
    "fa.big.Nf4(compute='bf61')": ARGUMENT,
    "fa.profile('runs', activities='gpu')": ARGUMENT,
    "fa.broadcast({'x': tensor_}).x": ATTRIBUTE,
    "fa.collectives.gather_objects(1)[0].nonsense": ATTRIBUTE,
    "fa.debug_launch(str)[0].nonsense": ATTRIBUTE,
    "train_step_.look(state, str).nonsense": ATTRIBUTE,
    "fa.schedules.warmup_stable_decay(1.0, warmup=1, total=9, decay=1, shape='round')": ARGUMENT,
}
"""Lines with one mistake each, and the rule of pyright that finds it."""

WRONG = START + "".join(f"{line}\n" for line in MISTAKES)


def errors(scripts, folder, python, *, sources=None):
    """What pyright reports about each script, as (line of text, rule) pairs.

    Args:
        scripts: their texts.
        folder: an empty folder for them.
        python: the interpreter of the environment that they are written for.
        sources: a folder to import from that is not installed.
    """
    texts = {f"script{number}.py": text for number, text in enumerate(scripts)}
    for name, text in texts.items():
        (folder / name).write_text(text)
    paths = [] if sources is None else [str(sources)]
    (folder / "pyrightconfig.json").write_text(json.dumps({"include": list(texts), "extraPaths": paths}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python)]
    # the interpreter tells pyright its sys.path, and PYTHONPATH may name the sources
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(texts)
    mistakes = {name: [] for name in texts}
    for each in found["generalDiagnostics"]:
        if each["severity"] == "error":
            name = Path(each["file"]).name
            line = texts[name].splitlines()[each["range"]["start"]["line"]]
            mistakes[name].append((line, each.get("rule", each["message"])))
    return list(mistakes.values())
