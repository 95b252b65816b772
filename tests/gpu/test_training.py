"""One process on a CUDA device: each strategy, transform and scope of compiling, against the same run on the CPU."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from tests.tiny_models import Net, batch_of, loss_fn, whole_params

STEPS = 4


def trained(step, strategy="local", optimizer=None, device="cuda", model=Net, batches=None):
    """Losses, whole parameters on the host, and the last metrics."""
    with fa.start(device=device) as world:
        assert world.device.type == device
        train_step = fa.train_step(
            step, model=fa.distribute(model, strategy), optimizer=optimizer or fa.adamw(0.01)
        )
        state = train_step.init(seed=0)
        losses = []
        for number in range(STEPS):
            state, metrics = train_step(state, fa.tree.to(batches or batch_of(12, seed=number), world.device))
            losses.append(metrics["loss"])
        params = fa.tree.to(whole_params(state), "cpu")
        found = (
            [float(loss) for loss in losses],
            params,
            {k: fa.tree.to(v, "cpu") for k, v in metrics.items()},
        )
        train_step.close()
    return found


def near(found, expected, tolerance=2e-5):
    assert found[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
    assert fa.tree.allclose(found[1], expected[1], rtol=tolerance, atol=tolerance)


STEPS_OF = {
    "plain": loss_fn,
    "accumulated": fa.accumulate(loss_fn, 4),
    "clipped": fa.clip_norm(loss_fn, 0.1),
    "clipped by value": fa.clip_value(loss_fn, 0.01),
    "skips": fa.skip_nonfinite(fa.clip_norm(loss_fn, 0.1)),
    "average": fa.with_ema(loss_fn, 0.9),
    "remat": fa.remat(loss_fn),
    "activations on the host": fa.remat(loss_fn, save="offload"),
    "weight": fa.with_weight(loss_fn, lambda batch: len(batch[1])),
}
STRATEGIES = {
    "local": fa.local(),
    "ddp": fa.ddp(),
    "fsdp": fa.fsdp(),
    "zero2": fa.fsdp(reshard_after_forward=False),
    "offload": fa.fsdp(offload=True),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", STEPS_OF)
def test_equals_the_cpu(name, strategy):
    near(trained(STEPS_OF[name], STRATEGIES[strategy]), trained(STEPS_OF[name], device="cpu"))


@pytest.mark.parametrize("optimizer", [fa.sgd(0.1, momentum=0.9), fa.adam(0.01), fa.adamw(0.01)], ids=str)
def test_optimizers(optimizer):
    near(trained(loss_fn, optimizer=optimizer), trained(loss_fn, optimizer=optimizer, device="cpu"))


@pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision(precision, strategy):
    policy = fa.transforms.Precision(compute="fp16", init_scale=256.0) if precision == "fp16" else precision
    step = fa.with_precision(fa.with_weight(loss_fn, lambda batch: len(batch[1])), policy)
    found = trained(step, STRATEGIES[strategy])
    near(found, trained(loss_fn, device="cpu"), 3e-2)
    assert ("loss_scale" in found[2]) == (precision == "fp16")


@pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
@pytest.mark.parametrize(
    "options",
    [{}, {"scope": "loss"}, {"scope": "block"}, {"mode": "reduce-overhead"}, {"mode": "max-autotune"}],
    ids=str,
)
def test_compiled(options, strategy):
    if options.get("scope") == "loss" and strategy == "fsdp":
        return  # refused, and tested on CPUs
    step = fa.compile(fa.skip_nonfinite(fa.clip_norm(fa.accumulate(loss_fn, 2), 0.5)), **options)
    near(trained(step, STRATEGIES[strategy]), trained(fa.clip_norm(loss_fn, 0.5), device="cpu"), 1e-4)


@pytest.mark.parametrize(
    "step", [s for name, s in STEPS_OF.items() if name != "remat"], ids=[n for n in STEPS_OF if n != "remat"]
)
def test_each_transform_is_captured(step):
    """A parameter of one element, the last bias, is where inductor fused wrongly."""
    optimizer = fa.sgd(0.1)
    near(trained(fa.compile(step), optimizer=optimizer), trained(step, device="cpu", optimizer=optimizer))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_compiled_low_precision(precision):
    policy = fa.transforms.Precision(compute="fp16", init_scale=256.0) if precision == "fp16" else precision
    step = fa.with_precision(fa.with_weight(loss_fn, lambda batch: len(batch[1])), policy)
    near(trained(fa.compile(step)), trained(loss_fn, device="cpu"), 3e-2)


class Dropping(Net):
    def forward(self, x):
        return self.out(torch.nn.functional.dropout(self.blocks[0](self.inp(x)), 0.5, self.training))


def test_dropout_is_a_function_of_the_seed():
    first, second = trained(loss_fn, model=Dropping), trained(loss_fn, model=Dropping)
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    again = trained(fa.remat(loss_fn, units=("Block",)), model=Dropping)
    near(again, first, 1e-6)


def test_a_skipped_update_is_decided_on_the_device():
    def spoiled(model, batch):
        x, y = batch
        loss = loss_fn(model, batch)
        return fa.Mean(loss.total * torch.where(x.sum() > 1e9, torch.inf, 1.0), weight=len(y))

    with fa.start():
        train_step = fa.train_step(
            fa.skip_nonfinite(spoiled), model=fa.distribute(Net, "local"), optimizer=fa.adamw(0.01)
        )
        state = train_step.init(seed=0)
        x, y = batch_of(8)
        before = whole_params(state)
        state, metrics = train_step(state, ((x * 1e30).cuda(), y.cuda()))
        assert float(metrics["skipped"]) == 1.0
        assert all(torch.equal(before[name], value) for name, value in whole_params(state).items())


@contextmanager
def no_wait():
    """Each wait for the device raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "step",
    [
        fa.clip_norm(fa.accumulate(loss_fn, 2), 1.0),
        fa.skip_nonfinite(loss_fn),
        fa.with_ema(loss_fn, 0.9),
        fa.with_weight(loss_fn, lambda batch: len(batch[1])),
        fa.with_precision(loss_fn, "bf16"),
        fa.with_precision(loss_fn, "fp16"),
        fa.with_precision(fa.with_weight(loss_fn, lambda batch: len(batch[1])), "fp16"),
    ],
    ids=["accumulated, clipped", "skips", "average", "weight", "bf16", "fp16", "fp16 weight"],
)
def test_no_step_waits_for_the_device(step):
    """An ordinary step of a loop never synchronises."""
    with fa.start():
        train_step = fa.train_step(step, model=fa.distribute(Net, "local"), optimizer=fa.adamw(0.01))
        state = train_step.init(seed=0)
        batch = fa.tree.to(batch_of(8), torch.device("cuda"))
        for _ in range(3):
            state, metrics = train_step(state, batch)
        with no_wait():
            for _ in range(3):
                state, metrics = train_step(state, batch)
        assert torch.isfinite(metrics["loss"])


def add_of(device):
    """A transform of the user's, whose state lies on a device."""

    def added(grads, own, info):
        return grads, own + 1

    return fa.Transform(
        f"on_{device}", fa.Phase.GRADS, apply=added, init=lambda params: torch.zeros(3, device=device)
    )


def test_states_of_a_step_that_the_device_leaves_out():
    """A weight that only the device knows is 0: the moments stay, and a state on the host counts the call."""

    def weighed(model, batch):
        x, y, valid = batch
        return fa.Mean((((model(x) - y) ** 2).mean(1) * valid).sum(), weight=valid.sum())

    with fa.start():
        step = add_of("cuda")(add_of("cpu")(weighed))
        train_step = fa.train_step(step, model=fa.distribute(Net, "local"), optimizer=fa.adamw(0.01))
        state = train_step.init(seed=0)
        x, y = fa.tree.to(batch_of(8), torch.device("cuda"))
        none, all_of_them = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
        state, _ = train_step(state, (x, y, all_of_them))
        before = whole_params(state)
        with no_wait():
            state, metrics = train_step(state, (x, y, none))
        assert float(metrics["weight"]) == 0
        assert state.transforms["on_cuda"].tolist() == [1.0] * 3
        assert state.transforms["on_cpu"].tolist() == [2.0] * 3
        assert all(torch.equal(before[name], value) for name, value in whole_params(state).items())


def test_a_spike_is_read_without_a_wait(caplog):
    with fa.start():
        step = fa.transforms.on_spike(loss_fn, do="skip", warmup=4)
        train_step = fa.train_step(step, model=fa.distribute(Net, "local"), optimizer=fa.sgd(0.01))
        state = train_step.init(seed=0)
        x, y = fa.tree.to(batch_of(8), torch.device("cuda"))
        spiked = []
        for number in range(12):
            rows = (x, y + 1e4 if number == 8 else y)
            with no_wait() if number else nullcontext():  # the first call checks more
                state, metrics = train_step(state, rows)
            spiked.append(metrics["spike"])
            torch.cuda.synchronize()
        assert [float(flag) for flag in spiked] == [float(number == 8) for number in range(12)]
        assert state.updates == 11
        assert "spike" in caplog.text


@pytest.mark.parametrize("strategy", ["local", "fsdp"])
def test_parameters_as_values(strategy):
    def maml(model, batch):
        x, y = batch
        params = fa.params(model)

        def task(params, x, y):
            inner = torch.func.grad(lambda p: (fa.call(model, p, x[None]) - y).square().sum())(params)
            fast = {name: value - 0.1 * inner[name] for name, value in params.items()}
            return (fa.call(model, fast, -x[None]) - y).square().sum()

        return fa.Mean(torch.func.vmap(task, (None, 0, 0))(params, x, y).sum(), weight=len(y))

    for change in (lambda step: step, lambda step: fa.accumulate(step, 4), fa.remat):
        near(trained(change(maml), STRATEGIES[strategy]), trained(maml, device="cpu"), 1e-4)


def test_a_head_in_chunks():
    """Loss and gradients of a linear layer and cross entropy, the largest tensor a chunk's."""

    def found(device):
        drawn = torch.Generator().manual_seed(0)
        hidden, weight = (
            torch.randn(*s, generator=drawn).to(device).requires_grad_() for s in ((96, 16), (211, 16))
        )
        labels = torch.randint(0, 211, (96,), generator=drawn).to(device)
        loss = fa.losses.linear_cross_entropy(hidden, weight, labels, rows=32, z_loss=1e-3, reduction="sum")
        return [x.cpu() for x in (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))]

    torch.testing.assert_close(found("cuda"), found("cpu"), rtol=1e-4, atol=1e-4)


def test_a_loader_prefetches_through_pinned_memory():
    x, y = batch_of(256)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, num_workers=2)
    runs = []
    for device in ("cpu", "cuda"):
        with fa.start(device=device):
            train_step = fa.train_step(loss_fn, model=fa.distribute(Net, "local"), optimizer=fa.sgd(0.05))
            state = train_step.init(seed=0)
            losses = []
            for state, metrics in fa.scan(train_step, state, fa.shard(loader, seed=3, prefetch=2), epochs=2):
                losses.append(metrics["loss"])
            runs.append([float(loss) for loss in losses])
            train_step.close()
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)
    assert len(runs[0]) == 32


@pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp", "offload"])
def test_checkpoints_go_between_devices(tmp_path, strategy):
    def run(device, strategy, start=None, steps=3, save=None):
        with fa.start(device=device) as world:
            train_step = fa.train_step(
                fa.with_ema(loss_fn, 0.9), model=fa.distribute(Net, strategy), optimizer=fa.adamw(0.01)
            )
            state = train_step.init(seed=0)
            if start:
                state = fa.restore(start, like=state)
            for number in range(state.step, steps):
                batch = fa.tree.to(batch_of(12, seed=number), world.device)
                state, _ = train_step(state, batch)
            if save:
                fa.save_async(save, state).wait()
            found = fa.tree.to(whole_params(state), "cpu")
            train_step.close()
            return found

    whole = run("cpu", "local", steps=6)
    run("cuda", STRATEGIES[strategy], save=tmp_path / "gpu")
    assert fa.tree.allclose(run("cpu", "local", tmp_path / "gpu", 6), whole, rtol=1e-4, atol=1e-5)
    run("cpu", "local", save=tmp_path / "cpu")
    assert fa.tree.allclose(
        run("cuda", STRATEGIES[strategy], tmp_path / "cpu", 6), whole, rtol=1e-4, atol=1e-5
    )


def test_collectives_on_tensors_of_the_device():
    with fa.start() as world:
        tree = {"a": torch.arange(3, device=world.device), "b": [torch.ones(2, device=world.device)]}
        assert fa.tree.allclose(fa.gather(tree), tree)
        assert fa.tree.allclose(fa.reduce(tree), tree)
        assert fa.tree.allclose(fa.broadcast(tree), tree)
        assert fa.gather(tree)["a"].device == world.device


def test_out_of_memory_names_what_holds_it():
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1024, 1024))

        def forward(self, x):
            return x @ self.weight

    def loss(model, batch):
        torch.empty(10**12, device="cuda", dtype=torch.uint8)
        return model(batch).sum()

    with fa.start():
        train_step = fa.train_step(loss, model=fa.distribute(Wide, "local"), optimizer=fa.sgd(0.1))
        state = train_step.init(seed=0)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            train_step(state, torch.ones(2, 1024, device="cuda"))
        assert "weight" in str(raised.value) + " ".join(getattr(raised.value, "__notes__", []))
        assert train_step.live_state is state


def test_memory_and_throughput_of_a_run(tmp_path):
    x, y = batch_of(256)
    with fa.start():
        train_step = fa.train_step(loss_fn, model=fa.distribute(Net, "local"), optimizer=fa.sgd(0.05))
        for _, metrics in fa.scan(
            train_step, train_step.init(seed=0), fa.shard(DataLoader(TensorDataset(x, y), batch_size=16)),
            watch=fa.Watch(throughput=True, memory=True), track=fa.Tracking("jsonl", directory=tmp_path),
        ):  # fmt: skip
            pass
    lines = "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))
    assert "peak_mib/update" in lines
