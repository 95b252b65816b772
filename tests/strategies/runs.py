"""What the engine tests run inside real ranks; each returns what the test looks at."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.world.world import current
from tests.tiny_models import Block, Net, batch_of, loss_fn, program, whole, whole_params

ROWS = (5, 3, 4, 2)


def rank_rows(step: int):
    """This rank's rows of a step, cut from one global batch, and the global batch."""
    world = current()
    sizes = ROWS[: world.size]
    batch = batch_of(sum(sizes), step)
    start = sum(sizes[: world.rank])
    return tuple(part[start : start + sizes[world.rank]] for part in batch), batch


def train(strategy, step=loss_fn, optimizer=None, model=Net, steps=3, **options):
    train_step = program(step, strategy=strategy, optimizer=optimizer, model=model, **options)
    state = train_step.init(seed=0)
    losses = []
    for call in range(steps):
        mine, _ = rank_rows(call)
        state, metrics = train_step(state, mine)
        losses.append(float(metrics["loss"]))
    return train_step, state, losses


def trained(strategy, kind="plain", **options):
    """Losses and whole parameters after a few steps."""
    step, optimizer, model, more = SETUPS[kind]()
    train_step, state, losses = train(strategy, step, optimizer, model, **more, **options)
    out = {"losses": losses, "params": whole_params(state)}
    if state.ema is not None:
        out["ema"] = {name: whole(value) for name, value in state.ema.items()}
    train_step.close()
    return out


def method_loss(model, batch):
    x, y = batch
    return fa.Mean((model.scored(x) - y).square().sum(), weight=len(y))


def block_method_loss(model, batch):
    x, y = batch
    hidden = model.blocks[0].encode(model.inp(x))
    return fa.Mean((model.out(hidden) - y).square().sum() + model(x).square().sum(), weight=len(y))


def unused_loss(model, batch):
    x, y = batch
    return fa.Mean((model.out(model.inp(x)) - y).square().sum(), weight=len(y))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(6, 3, bias=False)
        self.back = nn.Linear(6, 3, bias=False)
        self.back.weight = self.out.weight

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return (self.out(x) + self.back(x.cos())).sum(dim=1, keepdim=True)


SETUPS = {
    "plain": lambda: (loss_fn, None, Net, {}),
    "ema": lambda: (fa.with_ema(fa.accumulate(loss_fn, 2), 0.8), fa.adamw(0.05), Net, {}),
    "clip_value": lambda: (fa.clip_value(fa.accumulate(loss_fn, 2), 0.01), None, Net, {}),
    "weight": lambda: (
        fa.with_weight(fa.accumulate(loss_fn, 2), lambda batch: len(batch[1])), None, Net, {}
    ),
    "remat": lambda: (fa.remat(loss_fn), None, Net, {}),
    "compiled": lambda: (fa.compile(loss_fn, "block", backend="aot_eager"), None, Net, {}),
    "method": lambda: (method_loss, None, Net, {}),
    "block_method": lambda: (block_method_loss, None, Net, {}),
    "unused": lambda: (unused_loss, None, Net, {}),
    "tied": lambda: (loss_fn, None, Tied, {}),
    "frozen": lambda: (loss_fn, fa.adamw(0.05), Net, {"frozen": ("blocks.0.*", "inp.bias")}),
    "fp16": lambda: (
        fa.clip_norm(fa.with_precision(loss_fn, fa.transforms.Precision(compute="fp16", init_scale=64.0)), 1.0),
        None, Net, {},
    ),
    "nadam": lambda: (loss_fn, fa.optim.from_torch(torch.optim.NAdam, lr=0.05), Net, {}),
    "adafactor": lambda: (loss_fn, fa.optim.adafactor(0.05), Net, {}),
    "skipped": lambda: (fa.accumulate(loss_fn, 2), None, Skipping, {}),
    "sharded_adafactor": lambda: (
        loss_fn, fa.optim.from_torch(torch.optim.Adafactor, lr=0.05, whole=False), Net, {}
    ),
    "module": lambda: (loss_fn, None, _module_of_this_rank(), {}),
    "noise": lambda: (_noise(loss_fn), None, Net, {}),
}  # fmt: skip


def _module_of_this_rank():
    torch.manual_seed(100 * current().rank)  # ranks begin differently: rank 0's values must count
    return Net()


def _noise(step):
    def halve(grads, own, info):
        return {name: grad * 0.5 for name, grad in grads.items()}, own

    return fa.Transform("halve", fa.Phase.GRADS, apply=halve)(step)


def many(cases):
    """Several (strategy, kind) cases in one call."""
    return [trained(strategy, kind) for strategy, kind in cases]


def error_of(strategy, kind, **options):
    """The type and text of what a case raises."""
    try:
        trained(strategy, kind, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def unused_first_step(step=unused_loss):
    """What the first step raises, whether parameters are as they were, and whether the next one can be made."""
    train_step = fa.train_step(step, model=fa.distribute(Net, "ddp"), optimizer=fa.sgd(0.1))
    state = train_step.init()
    before, (mine, _) = whole_params(state), rank_rows(9)
    text = ""
    try:
        train_step(state, mine)
    except fa.errors.CapabilityError as error:
        text = error.what
    same = fa.tree.allclose(whole_params(state), before, rtol=0, atol=0)
    return text, same, train_step.live_state is state


def unused_last_micro_batch():
    """As `unused_first_step`, if the first micro-batch uses all parameters."""
    calls = []

    def loss(model, batch):
        calls.append(model.training)
        return (loss_fn if sum(calls) == 1 else unused_loss)(model, batch)

    return unused_first_step(fa.accumulate(loss, 2))


def fsdp_layout():
    """How a sharded state lies: local sizes, slots, and what look() sees."""
    train_step, state, _ = train("fsdp(units=('Block',))", optimizer=fa.adamw(0.1))
    weight = state.params["blocks.0.mix.weight"]
    out = {
        "local": tuple(weight.to_local().shape),
        "moment": tuple(state.opt["blocks.0.mix.weight"]["exp_avg"].to_local().shape),
        "global": tuple(state.opt["blocks.0.mix.weight"]["exp_avg"].shape),
        "looked": train_step.look(state, lambda model, x: model(x), torch.ones(2, 3)),
        "again": train_step.look(state, lambda model, x: model(x), torch.ones(2, 3)),
    }
    mine, _ = rank_rows(9)
    state, _ = train_step(state, mine)
    out["after"] = train_step.look(state, lambda model, x: model(x), torch.ones(2, 3))
    out["expected"] = _plain(state, torch.ones(2, 3))
    doubled = fa.tree.map_tensors(lambda x: x * 2, fa.snapshot(state))
    state = train_step.adopt(doubled)
    out["adopted"] = train_step.look(state, lambda model, x: model(x), torch.ones(2, 3))
    out["doubled"] = _plain(state, torch.ones(2, 3))
    train_step.close()
    return out


def _plain(state, x):
    """What an ordinary module with a state's parameters answers."""
    net = Net()
    net.load_state_dict(whole_params(state))
    return net(x).detach()


def meta_init():
    """A model without values raises until it has some."""
    train_step = program(strategy="fsdp(init='meta')")
    state = train_step.init()
    mine, _ = rank_rows(0)
    try:
        train_step(state, mine)
    except fa.errors.FnaccelError as error:
        raised = type(error).__name__
    else:
        raised = None
    other = program(strategy="fsdp")
    values = fa.snapshot(other.init(seed=3))
    other.close()
    state = train_step.adopt(values)
    state, metrics = train_step(state, mine)
    return raised, float(metrics["loss"])


def gan(strategy, steps=4):
    """Two programs with different accumulation, each lent the other's model."""
    disc_step = program(
        fa.accumulate(_disc_loss, 2), strategy=strategy, model=lambda: nn.Linear(3, 1), optimizer=fa.sgd(0.2)
    )
    gen_step = program(
        fa.clip_norm(fa.accumulate(_gen_loss, 3), 0.1),
        strategy=strategy, model=lambda: nn.Linear(2, 3), optimizer=fa.adamw(0.05),
    )  # fmt: skip
    disc, gen = disc_step.init(seed=1), gen_step.init(seed=2)
    losses = []
    for call in range(steps):
        mine, _ = gan_rows(call)
        disc, d = disc_step(disc, mine, given={"gen": gen})
        if call % 2:
            gen, g = gen_step(gen, mine, given={"disc": disc})
            losses.append((float(d["loss"]), float(g["loss"])))
    out = {
        "losses": losses,
        "disc": whole_params(disc),
        "gen": whole_params(gen),
        "counts": (disc.step, gen.step),
    }
    disc_step.close()
    gen_step.close()
    return out


def gan_rows(step):
    world = current()
    sizes = (5, 4)[: world.size]
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(sum(sizes), 3, generator=generator), torch.randn(sum(sizes), 2, generator=generator)
    start = sum(sizes[: world.rank])
    return tuple(part[start : start + sizes[world.rank]] for part in batch), batch


def _disc_loss(disc, batch, given):
    real, noise = batch
    with torch.no_grad():
        fake = given["gen"](noise)
    return fa.Mean(F.softplus(-disc(real)).sum() + F.softplus(disc(fake)).sum(), weight=len(real))


def _gen_loss(gen, batch, given):
    _, noise = batch
    return fa.Mean(F.softplus(-given["disc"](gen(noise))).sum(), weight=len(noise))


def mixed_teacher():
    """A sharded teacher lent to a replicated student; nothing of it moves, gradients flow through."""
    teach, learn = (
        program(strategy="fsdp(reshard_after_forward=False)"),
        program(_student_loss, strategy="ddp"),
    )
    teacher, student = teach.init(seed=1), learn.init(seed=2)
    before = whole_params(teacher)
    mine, _ = rank_rows(0)
    for _ in range(2):
        student, metrics = learn(student, mine, given={"teacher": teacher})
    same = all(torch.equal(before[k], v) for k, v in whole_params(teacher).items())
    teacher, _ = teach(teacher, mine)
    student, after = learn(student, mine, given={"teacher": teacher})
    out = same, float(metrics["loss"]), float(after["loss"]), whole_params(student)
    teach.close()
    learn.close()
    return out


def _student_loss(model, batch, given):
    x, _ = batch
    return fa.Mean((model(x) - given["teacher"](x)).square().sum(), weight=len(x))


def scores(strategy, n, batch_size, options):
    """evaluate over n rows, and what it must be."""
    x, y = batch_of(n)
    loader = DataLoader(TensorDataset(torch.arange(n).float(), x, y), batch_size=batch_size)
    train_step = program(fa.with_ema(_indexed_loss, 0.5), strategy=strategy)
    state = train_step.init()

    def metric(model, batch):
        index, x, y = batch
        error = (model(x) - y).square().sum()
        return {
            "error": fa.Mean(error, weight=len(y)), "rows": fa.Sum(len(y)), "index": fa.Concat(index),
            "mean": error / len(y),
        }  # fmt: skip

    found = fa.evaluate(train_step, state, metric, fa.shard(loader, **options))
    averaged = fa.evaluate(train_step, state, metric, fa.shard(loader, **options), ema=True)
    train_step.close()
    return {k: v.tolist() for k, v in found.items()}, averaged["error"].item()


def _indexed_loss(model, batch):
    return loss_fn(model, batch[1:])


def epoch_losses(strategy, n, batch_size, accumulate, options):
    """Two epochs through scan over a loader that ends raggedly."""
    x, y = batch_of(n)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)
    train_step = program(fa.accumulate(loss_fn, accumulate), strategy=strategy)
    state = train_step.init()
    losses, positions = [], []
    for state, metrics in fa.scan(train_step, state, fa.shard(loader, **options), epochs=2):
        losses.append(float(metrics["loss"]))
        positions.append((state.data.epoch, state.data.samples))
    out = {"losses": losses, "positions": positions, "params": whole_params(state)}
    train_step.close()
    return out


def failing_late(strategy):
    """A step whose second micro-batch fails leaves nothing for the next one."""
    fail = [True]

    def moody(model, batch):
        if fail and len(fail) == 2:
            fail.clear()
            raise ValueError("no luck")
        if fail:
            fail.append(True)
        return loss_fn(model, batch)

    train_step = program(fa.accumulate(moody, 2), strategy=strategy)
    state = train_step.init(seed=0)
    with contextlib.suppress(ValueError):
        train_step(state, rank_rows(5)[0])
    state, _ = train_step(state, rank_rows(0)[0])
    out = whole_params(state)
    train_step.close()
    return out


def tiny_clip(strategy):
    """A rank that holds no element of a model."""
    train_step = program(
        fa.clip_value(loss_fn, 0.1), strategy=strategy, model=lambda: nn.Linear(3, 1, bias=False)
    )
    state = train_step.init(seed=0)
    state, _ = train_step(state, rank_rows(0)[0])
    return whole_params(state)


def different_aux(kind):
    """Ranks whose losses report different things."""
    world = current()

    def loss(model, batch):
        plain = loss_fn(model, batch)
        keys = {"names": ("a", "b")[world.rank], "one": ("a", None)[world.rank]}[kind]
        return fa.Mean(plain.total, plain.weight, None if keys is None else {keys: plain.total.detach()})

    train_step = program(loss, strategy="ddp")
    state = train_step.init()
    train_step(state, rank_rows(0)[0])


def different_seeds():
    program(strategy="fsdp").init(seed=current().rank)


def different_plans():
    """Ranks that disagree."""
    world = current()
    train_step = program(fa.accumulate(loss_fn, 2 + world.rank), strategy="ddp")
    train_step.init()


def different_meshes():
    """Ranks whose strategies have other process groups: making them would wait for ranks that never come."""
    program(loss_fn, strategy="hsdp(2, 2)" if current().rank == 0 else "fsdp")


def different_functions(kind):
    """Ranks whose functions have one name and do different things."""
    first = current().rank == 0

    def choose(name, module):
        return isinstance(module, Block) if first else False

    def other(name, module):
        return False if first else isinstance(module, Block)

    other.__qualname__, chosen = choose.__qualname__, choose if first else other
    rate = (lambda updates: 0.1) if first else (lambda updates: 0.2)
    if kind == "units":
        program(strategy=fa.fsdp(units=chosen)).init()
    elif kind == "remat":
        program(fa.remat(loss_fn, units=chosen), strategy="ddp").init()
    elif kind == "rate":
        program(strategy="ddp", optimizer=fa.sgd(rate)).init()
    else:
        program(strategy="ddp", optimizer=fa.sgd(0.1, groups=[(chosen, {"optional": True})])).init()


class Skipping(Net):
    """Leaves a block out in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.inp(x)
        for number, block in enumerate(self.blocks):
            if number == 0 or self.calls % 2:
                x = block(x)
        return self.out(x)


def averaging(group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    tensor = bucket.buffer().div_(dist.get_world_size(group))
    return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda done: done.value()[0])


class Averaging:
    """A state of its own: it counts the buckets."""

    def __init__(self):
        self.buckets = 0

    @staticmethod
    def run(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.buckets += 1
        return averaging(dist.group.WORLD, bucket)


def prefetched(strategy):
    """The names of the units that each unit gathers ahead, in forward and in backward."""
    from torch.distributed.fsdp import FSDPModule

    calls = {"forward": [], "backward": []}
    with pytest.MonkeyPatch.context() as patch:
        for kind, seen in calls.items():
            patch.setattr(
                FSDPModule, f"set_modules_to_{kind}_prefetch", lambda _, units, seen=seen: seen.append(units)
            )
        train_step = program(strategy=strategy)
        state = train_step.init(seed=0)
        names = train_step.look(state, lambda model: {id(m): name for name, m in model.named_modules()})
    return tuple([[names[id(unit)] for unit in units] for units in seen] for seen in calls.values())


def units_of_gpt2():
    import transformers
    from torch.distributed.fsdp import FSDPModule

    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    program(model=lambda: model, strategy="fsdp(units='no_split')").init(seed=0)
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
