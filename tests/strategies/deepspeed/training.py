"""What the ranks of these tests run."""

from __future__ import annotations

from typing import Any

import torch

import fnaccel as fa
from fnaccel.engine.runtime_tensor import Remote
from fnaccel.world.world import current
from tests.parity.rows import RATES, STEPS, Net, Row, loss_fn, rank_batch, whole

NAMED = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True, "weight_decay": 0.01}}}


def train_fp16(stage: int, weighted: bool) -> dict[str, Any]:
    """Three updates in fp16 from a loss scale that overflows first; the batch of the overflow comes again."""
    # DeepSpeed refuses fp16 on a CPU that is slow at it; torch computes it there all the same
    import deepspeed

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    policy = fa.transforms.Precision(compute="fp16", init_scale=2.0**40, backoff=2.0**-30)
    step: Any = fa.clip_norm(fa.with_precision(loss_fn, policy), 0.25)
    if weighted:
        step = fa.with_weight(step, lambda batch: (batch["labels"] >= 0).sum())
    train_step = fa.train_step(
        step, model=fa.distribute(Net, fa.deepspeed(stage)), optimizer=fa.sgd(RATES["sgd"])
    )
    state = train_step.init(seed=0)
    found: dict[str, Any] = {"skipped": [], "scales": [], "updates": []}
    for number in (0, *range(STEPS)):
        state, metrics = train_step(state, rank_batch(number, current().rank))
        found["skipped"].append(float(metrics["skipped"]))
        found["scales"].append(float(metrics["loss_scale"]))
        found["updates"].append(float(state.updates))
    found["params"] = {name: whole(value) for name, value in state.params.items()}
    train_step.close()
    return found


def train_named(row: Row) -> dict[str, Any]:
    """A row with the optimizer that the configuration names."""
    strategy = fa.deepspeed(int(row.strategy[-1]), config=NAMED)
    train_step = fa.train_step(
        loss_fn, model=fa.distribute(Net, strategy), optimizer=fa.optim.from_deepspeed(RATES["adamw"])
    )
    state = train_step.init(seed=0)
    losses: list[float] = []
    for number in range(STEPS):
        state, metrics = train_step(state, rank_batch(number, current().rank))
        losses.append(float(metrics["loss"]))
    params = {name: whole(value) for name, value in state.params.items()}
    by = next(line.by for line in train_step.plan.rows if line.what == "from_deepspeed")
    train_step.close()
    return {"losses": losses, "params": params, "by": by}


def train_unlike(stage: int) -> dict[str, Any]:
    """Three steps, of which the second has a loss that is not finite."""

    def poisoned(model: Any, batch: Any) -> fa.Mean:
        found = loss_fn(model, batch)
        return fa.Mean(found.total * batch["factor"], weight=found.weight)

    step = fa.skip_nonfinite(poisoned)
    train_step = fa.train_step(step, model=fa.distribute(Net, fa.deepspeed(stage)), optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    found: dict[str, Any] = {"skipped": [], "updates": []}
    before: dict[str, torch.Tensor] = {}
    for number in range(3):
        batch = {
            **rank_batch(number, current().rank),
            "factor": torch.tensor(float("inf") if number == 1 else 1.0),
        }
        before = {name: whole(value) for name, value in state.params.items()} if number == 1 else before
        state, metrics = train_step(state, batch)
        if number == 1:
            found["unchanged"] = all(
                torch.equal(whole(state.params[name]), one) for name, one in before.items()
            )
        found["skipped"].append(float(metrics["skipped"]))
        found["updates"].append(float(state.updates))
    train_step.close()
    return found


def run_with(strategy: Any, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of three steps, and the norm of each parameter afterwards."""
    scope = options.pop("compile", None)
    chosen = strategy if isinstance(strategy, str) else fa.deepspeed(strategy, **options)
    step = fa.accumulate(fa.clip_norm(loss_fn, 0.25), 2)
    step = step if scope is None else fa.compile(step, scope=scope, backend="aot_eager")
    train_step = fa.train_step(step, model=fa.distribute(Net, chosen), optimizer=fa.adamw(0.02))
    state = train_step.init(seed=0)
    losses: list[float] = []
    for number in range(STEPS):
        state, metrics = train_step(state, rank_batch(number, current().rank))
        losses.append(float(metrics["loss"]))
    norms = [float(whole(value).norm()) for value in state.params.values()]
    train_step.close()
    return losses, norms


def run_offloaded(directory: Any, options: dict[str, Any]) -> list[str]:
    """Save what is offloaded, restore it in another engine, and go on; the paths that differ."""
    from tests.checkpoint.training import gathered, make, train, unequal

    step = make(fa.deepspeed(3, **options), transform=lambda one: one)
    state = train(step, step.init(seed=3), 0, 2)
    fa.save(directory, state)
    kept = gathered(state)
    went = gathered(train(step, state, 2, 1))
    state = fa.restore(directory, like=step.init(seed=9))
    wrong = unequal(gathered(state), kept)
    wrong += unequal(gathered(train(step, state, 2, 1)), went)
    return [path for path in wrong if current().is_main or not path.startswith("buffers/")]


def fail_and_go_on(stage: int) -> tuple[list[float], list[float]]:
    """Losses with a call in between that fails, and without."""

    def losses(fails: bool) -> list[float]:
        calls = 0

        def fragile(model: Any, batch: Any) -> fa.Mean:
            nonlocal calls
            calls += 1
            found = loss_fn(model, batch)
            if fails and calls == 5:
                raise ValueError("in the second micro-batch of the second step")
            return found

        step = fa.accumulate(fa.clip_norm(fragile, 0.25), 3)
        train_step = fa.train_step(
            step, model=fa.distribute(Net, fa.deepspeed(stage)), optimizer=fa.adamw(0.02)
        )
        state = train_step.init(seed=0)
        found: list[float] = []
        for number in range(STEPS):
            batch = rank_batch(number, current().rank)
            if fails and number == 1:
                try:
                    train_step(state, batch)
                except ValueError:
                    pass
                else:
                    raise AssertionError("the loss did not fail")
            state, metrics = train_step(state, batch)
            found.append(float(metrics["loss"]))
        train_step.close()
        return found

    return losses(True), losses(False)


def distil(student: int, teacher: int) -> tuple[list[float], list[float], bool]:
    """Losses of a student that follows a lent teacher: on DeepSpeed, and under ddp; whether the teacher moved."""

    def follow(model: Any, batch: Any, given: Any) -> fa.Mean:
        with torch.no_grad():
            wanted = given["teacher"](batch["tokens"])
        gap = model(batch["tokens"]) - wanted
        return fa.Mean(gap.square().sum(), weight=gap.numel())

    def losses(first: Any, second: Any) -> tuple[list[float], bool]:
        teach = fa.train_step(follow, model=fa.distribute(Net, second), optimizer=None)
        learn = fa.train_step(follow, model=fa.distribute(Net, first), optimizer=fa.adamw(0.02))
        lent, state = teach.init(seed=5), learn.init(seed=0)
        before = {name: whole(value) for name, value in lent.params.items()}
        found: list[float] = []
        for number in range(STEPS):
            state, metrics = learn(state, rank_batch(number, current().rank), given={"teacher": lent})
            found.append(float(metrics["loss"]))
        moved = any(not torch.equal(whole(lent.params[name]), one) for name, one in before.items())
        learn.close()
        teach.close()
        return found, moved

    mine, moved = losses(fa.deepspeed(student), fa.deepspeed(teacher))
    return mine, losses("ddp", "ddp")[0], moved


def two_models() -> tuple[list[list[float]], list[list[float]]]:
    """Losses of two models trained in turn, and of each alone."""

    def made(stage: int) -> Any:
        return fa.train_step(loss_fn, model=fa.distribute(Net, fa.deepspeed(stage)), optimizer=fa.adamw(0.02))

    def losses(stages: list[int]) -> list[list[float]]:
        steps = [made(stage) for stage in stages]
        states = [step.init(seed=number) for number, step in zip(stages, steps, strict=True)]
        found: list[list[float]] = [[] for _ in stages]
        for number in range(STEPS):
            for index, step in enumerate(steps):
                states[index], metrics = step(states[index], rank_batch(number, current().rank))
                found[index].append(float(metrics["loss"]))
        for step in steps:
            step.close()
        return found

    return losses([2, 3]), losses([2]) + losses([3])


def infer() -> tuple[float, float, str]:
    """What a model without an optimizer gives on DeepSpeed and by itself; what calling it says."""

    def total(model: Any, batch: Any) -> float:
        return float(model(batch["tokens"]).sum().detach())

    batch = rank_batch(0, current().rank)
    step = fa.train_step(loss_fn, model=fa.distribute(Net, fa.deepspeed(3)), optimizer=None)
    state = step.init(seed=0)
    looked = step.look(state, total, batch)
    refused = ""
    try:
        step(state, batch)
    except fa.errors.FnaccelError as error:
        refused = str(error)
    step.close()
    torch.manual_seed(0)
    return looked, total(Net(), batch), refused


def adopt_and_export(directory: Any) -> tuple[list[str], list[str]]:
    """A checkpoint written by DeepSpeed's own engine, adopted under ZeRO-2; then the model exported."""
    from safetensors.torch import load_file

    from tests.checkpoint.training import gathered, unequal

    def made(stage: int) -> tuple[Any, Any]:
        step = fa.train_step(loss_fn, model=fa.distribute(Net, fa.deepspeed(stage)), optimizer=fa.adamw(0.02))
        return step, step.init(seed=stage)

    first, state = made(3)
    state, _ = first(state, rank_batch(0, current().rank))
    first.engine.runtime.native.save_checkpoint(str(directory / "native"), tag="global_step1")
    kept = gathered(state)
    second, other = made(2)
    other = fa.interchange.adopt(directory / "native", like=other, trust_pickle=True)
    found = gathered(other)
    wrong = unequal({k: v for k, v in found.items() if k.startswith("params/")},
                    {k: v for k, v in kept.items() if k.startswith("params/")})  # fmt: skip
    fa.interchange.export_hf(directory / "hf", other, dtype="bf16")
    exported = load_file(directory / "hf" / "model.safetensors")
    bad = [
        name
        for name, value in other.params.items()
        if not torch.equal(exported[name], whole(value).to(torch.bfloat16))
    ]
    first.close()
    second.close()
    return wrong, bad


def foreign(stage: int, name: str, options: dict[str, Any]) -> tuple[list[float], list[float], str]:
    """Losses with an optimizer of torch on DeepSpeed and under ddp; what was said where it is refused."""

    def losses(strategy: Any) -> list[float]:
        optimizer = fa.optim.from_torch(getattr(torch.optim, name), lr=1e-2, **options)
        train_step = fa.train_step(loss_fn, model=fa.distribute(Net, strategy), optimizer=optimizer)
        try:
            state = train_step.init(seed=0)
            found: list[float] = []
            for number in range(STEPS):
                state, metrics = train_step(state, rank_batch(number, current().rank))
                found.append(float(metrics["loss"]))
            return found
        finally:
            train_step.close()

    try:
        return losses(fa.deepspeed(stage)), losses("ddp"), ""
    except fa.errors.FnaccelError as error:
        return [], [], str(error)


def half_norm() -> str:
    """What is said of BatchNorm in bf16."""
    from tests.checkpoint.training import make

    try:
        make("deepspeed_zero2", transform=lambda step: fa.with_precision(step, "bf16")).init(seed=0)
    except fa.errors.FnaccelError as error:
        return str(error)
    return ""


def wrong_rows() -> str:
    """What every rank says of a batch of four rows on the last one, where the file says five."""
    strategy = fa.deepspeed(config={"train_micro_batch_size_per_gpu": 5, "zero_optimization": {"stage": 1}})
    train_step = fa.train_step(loss_fn, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    last = current().rank == current().size - 1
    batch = {name: value[: 4 if last else 5] for name, value in rank_batch(0, 0).items()}
    try:
        train_step(state, batch)
    except fa.errors.FnaccelError as error:
        whole = {name: value[:5] for name, value in rank_batch(0, 0).items()}
        train_step(state, whole)  # the state is live, and nothing is left of the failed step
        return str(error)
    finally:
        train_step.close()
    return ""


def scheduled(stage: int) -> tuple[list[float], list[float]]:
    """The rates of five updates of DeepSpeed's WarmupLR, and of the last three once more after a snapshot."""
    schedule = {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
        },
    }
    strategy = fa.deepspeed(stage, config={"scheduler": schedule})
    optimizer = fa.adamw(fa.optim.deepspeed_lr(0.1, warmup=10))
    train_step = fa.train_step(loss_fn, model=fa.distribute(Net, strategy), optimizer=optimizer)
    state = train_step.init(seed=0)
    rates: list[float] = []
    kept: Any = None
    for number in range(5):
        if number == 2:
            kept = fa.snapshot(state)
        state, metrics = train_step(state, rank_batch(number, current().rank))
        rates.append(float(metrics["lr"]))
    state = train_step.adopt(kept)
    again: list[float] = []
    for number in range(2, 5):
        state, metrics = train_step(state, rank_batch(number, current().rank))
        again.append(float(metrics["lr"]))
    train_step.close()
    return rates, again


class Breaks(torch.autograd.Function):
    """An identity whose backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("in the middle of backward")


def break_backward(stage: int) -> tuple[bool, str]:
    """After a backward pass that failed: whether parameters are as before, and what the next call says."""

    class Fragile(Net):
        breaks = True

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for number, block in enumerate(self.blocks):
                x = block(x)
                if self.breaks and number == 0:
                    x = Breaks.apply(x)
            return self.out(x)

    train_step = fa.train_step(
        loss_fn, model=fa.distribute(Fragile, fa.deepspeed(stage)), optimizer=fa.sgd(0.1)
    )
    state = train_step.init(seed=0)
    before = {name: whole(value) for name, value in state.params.items()}
    said = ""
    try:
        train_step(state, rank_batch(0, current().rank))
    except ValueError:
        Fragile.breaks = False
    same = all(torch.equal(whole(state.params[name]), one) for name, one in before.items())
    try:
        train_step(state, rank_batch(0, current().rank))
    except fa.errors.FnaccelError as error:
        said = str(error)
    train_step.close()
    return same, said


def replaced_linear(zero3_init: bool) -> list[list[bool]]:
    """Whether torch's linear function is replaced: in a loss under stage 3, and outside, with no engine closed."""
    before = torch.nn.functional.linear
    replaced: list[bool] = []
    options = {"zero3_init": True} if zero3_init else {}

    def watched(model, batch):
        replaced.append(torch.nn.functional.linear is not before)
        return loss_fn(model, batch)

    model = fa.distribute(lambda: Net(8), fa.deepspeed(3, **options))
    train_step = fa.train_step(watched, model=model, optimizer=fa.adamw(0.01))
    state = train_step.init(seed=0)
    after_init = torch.nn.functional.linear is not before
    train_step(state, rank_batch(0, current().rank))
    return [replaced, [after_init, torch.nn.functional.linear is not before]]


def held_after_closing(stage: int) -> list[int]:
    """Bytes of all tensors that are alive after each of four train steps was made, used and closed."""
    import gc

    found: list[int] = []
    for _ in range(4):
        train_step = fa.train_step(
            loss_fn, model=fa.distribute(lambda: Net(32), fa.deepspeed(stage)), optimizer=fa.adamw(0.01)
        )
        train_step(train_step.init(seed=0), rank_batch(0, current().rank))
        train_step.close()
        gc.collect()
        alive = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        # graphs of other tests keep tensors of vmap, which have no storage
        alive = [one for one in alive if not torch._C._functorch.is_functorch_wrapped_tensor(one)]
        sizes = [one.untyped_storage().nbytes() for one in alive if not isinstance(one, Remote)]
        found.append(
            sum(size for size in sizes if isinstance(size, int))
        )  # tensors without values have symbols
    return found
