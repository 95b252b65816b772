"""What runs in a process with XLA devices; results go to a file. `python -m tests.strategies.xla.jobs FOLDER`."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn

import fnaccel as fa
from fnaccel.world.random_streams import stream_of
from tests.parity.rows import STEPS, Row, loss_fn, make_optimizer, make_step, rank_batch
from tests.parity.rows import Net as OddNet

DEVICES = (1, 4)
EVEN, RAGGED = 4, 3  # how many ranks' rows make the global batch: 36 rows, 12 to a micro-batch; or 28


def net():
    """Eight columns, so that four devices have something to share; `out.bias` they don't."""
    return OddNet(8)


class Tied(nn.Module):
    """One weight under two names, a buffer, and dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens):
        if self.training:
            self.seen.add_(1.0)
        return self.out(self.drop(self.embed(tokens)))


def parity_rows(devices):
    """The rows of the matrix for so many devices, and how many ranks' rows are one batch."""
    strategies = ("xla()", "xla(shard=True)") + (("xla(shard=2)",) if devices == 4 else ())
    for strategy in strategies:
        for precision in ("fp32", "bf16"):
            for accumulate in (1, 3):
                for clip in (None, 0.25):
                    yield Row(strategy=strategy, precision=precision, accumulate=accumulate, clip=clip), EVEN
        yield Row(strategy=strategy, accumulate=3, clip=0.25, optimizer="adamw"), EVEN
        yield Row(strategy=strategy, accumulate=3, clip=0.25), RAGGED


def global_batch(step, ranks):
    parts = [rank_batch(step, rank) for rank in range(ranks)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def compiled():
    import torch_xla.debug.metrics as met

    found = met.metric_data("CompileTime")
    return 0 if found is None else found[0]


def spec(value):
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(value)


def host(tree):
    return fa.tree.map_tensors(lambda x: x.detach().cpu().clone(), tree)


def run_row(row, ranks, steps=STEPS):
    train_step = fa.train_step(
        make_step(row), model=fa.distribute(net, row.strategy), optimizer=make_optimizer(row)
    )
    state = train_step.init(seed=0)
    losses, norms, compiles = [], [], []
    for step in range(steps):
        before = compiled()
        state, metrics = train_step(state, global_batch(step, ranks))
        compiles.append(compiled() - before)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics.get("grad_norm", 0.0)))
    found = {
        "losses": losses, "norms": norms, "compiles": compiles, "params": host(state.params),
        "specs": {name: spec(value) for name, value in state.params.items()},
        "slots": {f"{name}/{slot}": spec(v) for name, slots in state.opt.items() for slot, v in slots.items()},
        "plan": str(train_step.plan),
    }  # fmt: skip
    train_step.close()
    return found


def parity(folder):
    found = {}
    with fa.start(device="xla") as world, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for row, ranks in parity_rows(devices()):
            said.clear()
            found[f"{row}-{ranks}"] = run_row(row, ranks) | {"warned": [str(one.message) for one in said]}
        assert world.device.type == "xla"
    return found


def devices():
    return int(os.environ["CPU_NUM_DEVICES"])


def schedule(folder):
    """Eight steps under a schedule that begins and ends at 0, with everything that holds state."""
    with fa.start(device="xla"):
        step = fa.with_ema(fa.skip_nonfinite(fa.clip_norm(fa.accumulate(loss_fn, 3), 0.5)), 0.9)
        rate = fa.warmup_cosine(0.02, warmup=3, total=8)
        plain = fa.accumulate(loss_fn, 3)
        found = {}
        for name, chosen in (("everything", step), ("plain", plain)):
            train_step = fa.train_step(
                chosen, model=fa.distribute(net, fa.xla(shard=True)), optimizer=fa.adamw(rate)
            )
            state = train_step.init(seed=0)
            counts = []
            for index in range(8):
                before = compiled()
                state, _ = train_step(state, global_batch(index, EVEN))
                counts.append(compiled() - before)
            found[name] = counts
            train_step.close()
        return found


def skipping(folder):
    """A step whose gradient is NaN between two good ones; and the average after one step."""

    def bad(model, batch):
        found = loss_fn(model, batch)
        return fa.Mean(found.total * batch["factor"].sum(), weight=found.weight)

    with fa.start(device="xla"):
        step = fa.with_ema(fa.skip_nonfinite(bad), 0.75)
        train_step = fa.train_step(
            step, model=fa.distribute(net, fa.xla(shard=True)), optimizer=fa.adamw(0.02)
        )
        state = train_step.init(seed=0)
        trees, skipped = [host({"params": state.params, "opt": state.opt, "ema": state.ema})], []
        for index, factor in enumerate((1.0, float("nan"), 1.0)):
            batch = global_batch(index, EVEN) | {"factor": torch.tensor([factor])}
            state, metrics = train_step(state, batch)
            trees.append(host({"params": state.params, "opt": state.opt, "ema": state.ema}))
            skipped.append(float(metrics["skipped"]))
        found = {"trees": trees, "skipped": skipped, "updates": float(state.updates)}
        train_step.close()
    return found


def tied(folder):
    """Two runs of one seed, and what became of the tied weight."""
    runs = []
    with fa.start(device="xla"):
        for seed in (0, 0, 1):
            train_step = fa.train_step(
                loss_fn, model=fa.distribute(Tied, fa.xla(shard=True)), optimizer=fa.sgd(0.1)
            )
            state = train_step.init(seed=seed)
            losses = []
            for step in range(3):
                state, metrics = train_step(state, global_batch(step, EVEN))
                losses.append(float(metrics["loss"]))
            model = train_step.engine.layout.model
            runs.append({
                "losses": losses, "names": list(state.params), "one": model.out.weight is model.embed.weight,
                "buffer": float(state.buffers["seen"]), "on": state.params["embed.weight"].device.type,
            })  # fmt: skip
            train_step.close()
    return {"runs": runs}


def checkpoint(folder):
    """Save under one strategy, go on under another; each against the run that was not interrupted."""
    found = {}
    for source, target in (
        ("xla(shard=True)", "local()"),
        ("local()", "xla(shard=True)"),
        ("xla()", "xla(shard=True)"),
    ):
        where = folder / f"{source}-{target}"
        with fa.start(device="xla" if "xla" in source else "cpu"):
            train_step = make_trained(source)
            state = train_step.init(seed=0)
            for step in range(2):
                state, _ = train_step(state, global_batch(step, EVEN))
            if source == "xla()":
                fa.save_async(where, state).wait()
            else:
                fa.save(where, state)
            written = host({"params": state.params, "opt": state.opt, "ema": state.ema})
            state, metrics = train_step(state, global_batch(2, EVEN))
            uninterrupted = float(metrics["loss"]), host(state.params)
            train_step.close()
        with fa.start(device="xla" if "xla" in target else "cpu"):
            train_step = make_trained(target)
            state = fa.restore(where, like=train_step.init(seed=1))
            read = host({"params": state.params, "opt": state.opt, "ema": state.ema})
            specs = {} if "xla" not in target else {name: spec(value) for name, value in state.params.items()}
            state, metrics = train_step(state, global_batch(2, EVEN))
            resumed = float(metrics["loss"]), host(state.params)
            found[f"{source} -> {target}"] = {
                "written": written, "read": read, "uninterrupted": uninterrupted, "resumed": resumed,
                "step": state.step, "specs": specs,
            }  # fmt: skip
            train_step.close()
    return found


def make_trained(strategy):
    step = fa.with_ema(fa.clip_norm(fa.accumulate(loss_fn, 3), 0.5), 0.9)
    return fa.train_step(step, model=fa.distribute(net, strategy), optimizer=fa.adamw(0.02))


def loops(folder):
    """`scan` and `evaluate` over a loader with a remainder, as `local` and as `xla`."""
    x = torch.randn(52, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))

    def loss(model, batch):
        inputs, labels = batch
        nll = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        return fa.Mean(nll, weight=len(labels))

    def score(model, batch):
        inputs, labels = batch
        return {"right": fa.Mean((model(inputs).argmax(1) == labels).sum(), weight=len(labels)),
                "rows": fa.Concat(model(inputs)[:, 0])}  # fmt: skip

    found = {}
    for strategy, device in (("xla(shard=True)", "xla"), ("local()", "cpu")):
        with fa.start(device=device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train_step = fa.train_step(
                loss,
                model=fa.distribute(lambda: nn.Linear(8, 3), strategy),
                optimizer=fa.sgd(0.3, momentum=0.9),
            )
            state = train_step.init(seed=0)
            shards = fa.shard(torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))
            losses = []
            for state, metrics in fa.scan(train_step, state, shards, epochs=2):
                losses.append(float(metrics["loss"]))
            scores = fa.evaluate(train_step, state, score, shards)
            found[device] = {"losses": losses, "scores": host(scores), "position": state.data.epoch}
            train_step.close()
    return found


def steady(folder):
    """Twenty steps over every host number that a schedule, a bias correction and a seed give; how many compiled."""
    with fa.start(device="xla"):
        step = fa.with_ema(fa.skip_nonfinite(fa.clip_norm(loss_fn, 0.5)), 0.9)
        rate = fa.warmup_cosine(0.02, warmup=5, total=20)
        train_step = fa.train_step(
            step, model=fa.distribute(net, fa.xla(shard=True)), optimizer=fa.adamw(rate, betas=(0.5, 0.5))
        )
        state = train_step.init(seed=0)
        counts = []
        for index in range(20):
            before = compiled()
            batch = {name: value[:16] for name, value in global_batch(index % 3, EVEN).items()}
            state, metrics = train_step(state, batch)
            float(metrics["loss"])
            counts.append(compiled() - before)
        train_step.close()
    return {"counts": counts}


def copies(folder):
    """A snapshot of which one part is read at once, and the rest after two steps."""
    found = {}
    with fa.start(device="xla"):
        for strategy in ("xla()", "xla(shard=True)"):
            train_step = make_trained(strategy)
            state = train_step.init(seed=0)
            state, _ = train_step(state, global_batch(0, EVEN))
            kept = fa.snapshot(state)
            kept.params["out.bias"].detach().cpu()
            expected = host({"params": state.params, "opt": state.opt, "ema": state.ema})
            for step in (1, 2):
                state, _ = train_step(state, global_batch(step, EVEN))
            later = host({"params": kept.params, "opt": kept.opt, "ema": kept.ema})
            state, metrics = train_step(train_step.adopt(kept), global_batch(1, EVEN))
            found[strategy] = {"expected": expected, "later": later, "loss": float(metrics["loss"])}
            train_step.close()
    return found


def half(folder):
    """Everything in bf16, averages too."""
    pure = fa.transforms.Precision(param="bf16", compute="bf16")
    with fa.start(device="xla"):
        step = fa.with_precision(fa.with_ema(fa.skip_nonfinite(loss_fn), 0.75), pure)
        train_step = fa.train_step(step, model=fa.distribute(net, fa.xla(shard=True)), optimizer=fa.sgd(0.1))
        state = train_step.init(seed=0)
        first = host(state.params)
        state, _ = train_step(state, global_batch(0, EVEN))
        found = {"first": first, "params": host(state.params), "ema": host(state.ema)}
        train_step.close()
    return found


def columns(folder):
    """What is warned of where a tensor of the batch is no column of rows, and where rows don't divide."""
    found = {}

    def weighted(model, batch):
        return fa.Mean(loss_fn(model, batch).total * batch["classes"].sum(), weight=1)

    with fa.start(device="xla"):
        train_step = fa.train_step(weighted, model=fa.distribute(net, "xla()"), optimizer=fa.sgd(0.0))
        state = train_step.init(seed=0)
        for name, rows in (("divide", 36), ("do not", 30)):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                batch = {key: value[:rows] for key, value in global_batch(0, EVEN).items()}
                state, metrics = train_step(state, batch | {"classes": torch.tensor([0.5, 0.25, 0.25])})
                found[name] = {"warned": [str(one.message) for one in said], "loss": float(metrics["loss"])}
        train_step.close()
    return found


def streams(folder):
    """Random states of all 64 bits come back, and give the same numbers."""
    import torch_xla.core.xla_model as xm

    found = []
    with fa.start(device="xla") as world:
        stream = stream_of(world.device)
        for seed in (0, 2**63 - 1, 2**63 + 5, 2**64 - 1):
            xm.set_rng_state(seed, str(world.device))
            state = stream.get_state()
            first = torch.rand(3, device=world.device).cpu()
            stream.set_state(state)
            found.append(
                [
                    seed == int(xm.get_rng_state(str(world.device))),
                    first,
                    torch.rand(3, device=world.device).cpu(),
                ]
            )
    return {"found": found}


def broken(folder):
    """A step that XLA refuses, with another train step beside it that goes on."""
    pure = fa.transforms.Precision(param="bf16", compute="bf16")

    def mixed(model, batch):
        x = batch["x"].float() if "wide" in batch else batch["x"]
        return fa.Mean(model(x).square().sum(), weight=len(x))

    with fa.start(device="xla"):
        train_step = fa.train_step(
            fa.with_precision(mixed, pure),
            model=fa.distribute(lambda: nn.Linear(8, 8), "xla()"),
            optimizer=fa.sgd(0.1),
        )
        beside = make_trained("xla()")
        going = beside.init(seed=0)
        state = train_step.init(seed=0)
        try:
            train_step(state, {"x": torch.ones(8, 8), "wide": torch.ones(8, dtype=torch.int64)})
        except fa.errors.NotCompiledError as error:
            said = str(error)
        else:
            said = "nothing was raised"
        going, metrics = beside(going, global_batch(0, EVEN))
        goes = float(metrics["loss"])
        beside.close()
        state, metrics = train_step(train_step.init(seed=0), {"x": torch.ones(8, 8, dtype=torch.bfloat16)})
        anew = float(metrics["loss"])
        train_step.close()
        after = run_row(Row(strategy="xla()"), EVEN, steps=1)["losses"]
    return {"said": said, "after": after, "goes": goes, "anew": anew}


def mistakes(folder):
    """Messages of what an XLA world refuses."""
    found = {}

    def tried(name, make):
        try:
            make()
        except fa.errors.FnaccelError as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "nothing was raised"

    def program(step=loss_fn, strategy="xla()"):
        return fa.train_step(step, model=fa.distribute(net, strategy), optimizer=fa.sgd(0.1))

    with fa.start(device="xla"):
        tried("fp16", lambda: program(fa.with_precision(loss_fn, "fp16")))
        tried("local", lambda: program(strategy="local()"))
        tried("remat", lambda: program(fa.remat(loss_fn, units=("Block",))))
        tried("compile", lambda: program(fa.compile(loss_fn)))
        tried("number", lambda: fa.start(device="xla:7"))
        tried("groups", lambda: program(strategy="xla(shard=3)"))
    return found


JOBS = (
    parity, schedule, steady, skipping, half, copies, columns, streams, tied, checkpoint, loops, mistakes,
    broken,
)  # fmt: skip


def main(folder):
    results = {}
    for job in JOBS:
        try:
            results[job.__name__] = job(folder)
        except Exception:
            results[job.__name__] = {"error": traceback.format_exc()}
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
