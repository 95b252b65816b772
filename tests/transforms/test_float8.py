"""fp8: emulated on real data, on every strategy; which layers; devices; TransformerEngine's calls, recorded."""

from __future__ import annotations

import contextlib
import functools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel import _torch, errors
from fnaccel.models.layers import folded
from fnaccel.testing import assert_close
from fnaccel.transforms.float8.record import check_device
from fnaccel.world.world import current

pytest.importorskip("torchao")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TRAIN, BATCH = 1_400, 50


class Net(nn.Module):
    """Two layers that fp8 takes, a norm, and a head whose 10 classes it does not take."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.blocks[0](x))
        return self.head(F.relu(self.blocks[1](self.norm(x))))


@functools.cache
def digits():
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(1_797, generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.data / 16, dtype=torch.float32)[order], torch.tensor(found.target)[order]


def loss_fn(model, batch):
    x, y = batch
    return fa.Mean(F.cross_entropy(model(x).float(), y, reduction="sum"), weight=len(y))


def fp8(recipe="tensorwise", **options):
    return fa.transforms.Float8(recipe=recipe, emulate=True, **options)


def made(precision, strategy="local", model=Net, optimizer=None, step=loss_fn):
    return fa.train_step(
        fa.with_precision(step, precision),
        model=fa.distribute(model, strategy),
        optimizer=optimizer or fa.adamw(3e-3),
    )


@functools.cache
def accuracy(precision, epochs=10, seeds=3):
    """On 397 digits that were not trained on, the mean of several seeds: one digit is a quarter of a point."""
    x, y = digits()
    rate = fa.warmup_cosine(3e-3, warmup=10, total=epochs * TRAIN // BATCH)
    right = 0
    for seed in range(seeds):
        train_step = made(precision, optimizer=fa.adamw(rate))
        state = train_step.init(seed=seed)
        for epoch in range(epochs):
            order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))
            for rows in order.split(BATCH):
                state, _ = train_step(state, (x[rows], y[rows]))
        answers = train_step.look(state, lambda model, rows: model(rows).argmax(1), x[TRAIN:])
        right += int((answers == y[TRAIN:]).sum())
        train_step.close()
    return right / (seeds * len(y[TRAIN:]))


@pytest.fixture
def world():
    with fa.start() as started:
        yield started


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_digits_within_a_point_of_bf16(recipe, world):
    assert accuracy("bf16") > 0.95
    assert accuracy(fp8(recipe)) > accuracy("bf16") - 0.01


def test_products_are_rounded_to_fp8(world):
    """A loss in bf16 differs, by no more than fp8's three digits allow."""
    x, y = digits()
    losses = {}
    for name, precision in (("bf16", "bf16"), ("fp8", fp8())):
        train_step = made(precision)
        _, metrics = train_step(train_step.init(seed=0), (x[:64], y[:64]))
        losses[name] = float(metrics["loss"])
    assert 1e-5 < abs(losses["bf16"] - losses["fp8"]) < 0.05


def test_layers_in_fp8_take_bf16(world):
    """As under a GPU's autocast: torchao's layer does not look at the CPU's, and would round fp32 itself."""
    train_step = made(fp8())
    state = train_step.init(seed=0)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))

    def first(model, x):
        out = model.blocks[0](x)
        return str(out.dtype), out

    wide, narrow = (train_step.look(state, first, one) for one in (x, x.bfloat16()))
    assert wide[0] == narrow[0] == "torch.bfloat16"
    assert torch.equal(wide[1], narrow[1])


def test_remat_comes_after(world):
    x, y = digits()
    losses = []
    for step in (fa.with_precision(loss_fn, fp8()), fa.remat(fa.with_precision(loss_fn, fp8()))):
        train_step = fa.train_step(step, model=fa.distribute(Net, "local"), optimizer=fa.sgd(0.1))
        state = train_step.init(seed=0)
        for _ in range(2):
            state, metrics = train_step(state, (x[:64], y[:64]))
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1]


def test_a_recipe_may_say_fp8():
    from fnaccel.config.applying import transformed

    names = [one.name for one in transformed(fa.config.Recipe(precision="fp8"), loss_fn).transforms]
    assert names == ["float8", "with_precision"]


def steps_of(precision, strategy, optimizer=None):
    """Losses, whole parameters and what layers became, from unequal parts of one global batch."""
    x, y = digits()
    world = current()
    train_step = made(precision, strategy, optimizer=fa.sgd(0.3), step=fa.clip_norm(loss_fn, 1.0))
    state = train_step.init(seed=0)
    losses = []
    for step in range(4):
        rows = slice(64 * step, 64 * step + 64)
        mine = (x[rows], y[rows])
        if world.size == 2:
            mine = tuple(part[:45] if world.rank == 0 else part[45:] for part in mine)
        state, metrics = train_step(state, mine)
        losses.append(float(metrics["loss"]))
    params = {
        name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
        for name, v in state.params.items()
    }
    converted = fa.transforms.float8_layers(train_step).converted
    train_step.close()
    return {"losses": losses, "params": params, "converted": converted}


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_strategies_agree(recipe, pools, world):
    """One rounding to e4m3 is 2**-4 relative; of thousands that are averaged, bf16's tolerance is left.

    Weights are rounded from bf16 under fsdp, which gathers them so, and from fp32 elsewhere; activations
    have a scale of their own on each rank, where the recipe has one for a tensor.
    """
    alone = steps_of(fp8(recipe), "local")
    found = {name: pools.run(2, steps_of, fp8(recipe), name) for name in ("ddp", "fsdp", "hsdp(1, 2)")}
    for results in found.values():
        assert results[0]["losses"] == results[1]["losses"]
        assert results[0]["converted"] == alone["converted"] == ("blocks.0", "blocks.1")
        for what in ("losses", "params"):
            assert_close(results[0][what], alone[what], precision="bf16")


def gathered():
    """The type of a shard, a loss, and whether a restored state goes on as the one that was saved."""
    import tempfile

    x, y = digits()
    with tempfile.TemporaryDirectory() as folder:
        folder = fa.collectives.broadcast_objects(folder)
        train_step = made(fp8(all_gather=True), "fsdp", optimizer=fa.adamw(1e-2))
        state = train_step.init(seed=0)
        state, metrics = train_step(state, (x[:64], y[:64]))
        fa.save(folder, state)
        after = []
        for _ in range(2):
            for _ in range(2):
                state, metrics = train_step(state, (x[64:128], y[64:128]))
            after.append(float(metrics["loss"]))
            state = fa.restore(folder, like=state)
        kind = type(train_step.engine.layout.parameters["blocks.0.weight"]._local_tensor).__name__
        train_step.close()
    return kind, after


def test_weights_sent_as_fp8(pools, world):
    for kind, after in pools.run(2, gathered):
        assert kind == "WeightWithDynamicFloat8CastTensor"
        assert after[0] == after[1]


def test_the_plan_lists_what_is_converted_and_why_the_rest_is_not(world):
    train_step = made(fp8(skip=("blocks.1*",)))
    text = str(train_step.plan)
    assert "in fp8: blocks.0\n" in text
    assert "not blocks.1: skip='blocks.1*'" in text
    assert "not head: 10 features, not a multiple of 16" in text
    assert "recipe tensorwise, by torchao, emulated" in text
    train_step.init()
    found = fa.transforms.float8_layers(train_step)
    assert found.converted == ("blocks.0",)
    assert set(found.skipped) == {"blocks.1", "head"}
    kinds = {path: type(layer).__name__ for path, layer in train_step.engine.layout.model.named_modules()}
    assert (kinds["blocks.0"], kinds["blocks.1"], kinds["head"]) == ("Float8Linear", "Linear", "Linear")


def test_the_plan_builds_nothing_and_draws_nothing(world):
    devices = []

    def factory():
        net = Net()
        devices.append(net.head.weight.device.type)
        return net

    before = torch.get_rng_state()
    made(fp8(), model=factory)
    assert devices == ["meta"]
    assert torch.equal(before, torch.get_rng_state())


def test_a_factory_that_needs_values_is_known_after_init(world):
    def factory():
        net = Net()
        net.scale = float(net.head.weight.sum())
        return net

    train_step = made(fp8(), model=factory)
    assert "known when init has built it" in str(train_step.plan)
    train_step.init()
    assert fa.transforms.float8_layers(train_step).converted == ("blocks.0", "blocks.1")


def test_several_models_and_a_built_module(world):
    step = fa.with_precision(lambda models, batch: loss_fn(models["one"], batch), fp8())
    train_step = fa.train_step(
        step, model=fa.distribute({"one": Net(), "two": Net}, "local"), optimizer=fa.sgd(0.1)
    )
    assert "one in fp8: blocks.0-1" in str(train_step.plan)
    train_step.init()
    assert [len(one.converted) for one in fa.transforms.float8_layers(train_step)] == [2, 2]


def test_other_linears_tied_weights_and_roots_are_skipped(world):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(32, 2)
            self.inp, self.out = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.out.weight = self.inp.weight

    tied = fa.transforms.Float8(emulate=True).layers(Odd)
    assert tied.converted == ("inp", "out")
    assert "of its own kind" in tied.skipped["attend.out_proj"]
    assert "tied" in fa.transforms.Float8(emulate=True, all_gather=True).layers(Odd).skipped["out"]
    assert fa.transforms.Float8(emulate=True).layers(nn.Linear(16, 16)).skipped == {
        "the model itself": "there is no module to put another layer in"
    }


def test_paths_fold():
    paths = [f"layers.{n}.up" for n in (0, 1, 2, 5)] + ["out", "conv2d"]
    assert folded(paths) == "layers.{0-2,5}.up, out, conv2d"
    assert folded(["a.3"]) == "a.3"


@pytest.mark.long
def test_compiled_equals_eager(world):
    x, y = digits()
    losses = []
    for step in (loss_fn, fa.compile(loss_fn, "step", backend="aot_eager")):
        train_step = made(fp8(), step=step)
        state = train_step.init(seed=0)
        for _ in range(2):
            state, metrics = train_step(state, (x[:64], y[:64]))
        losses.append(float(metrics["loss"]))
    assert_close(losses[1], losses[0], precision="bf16")


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "recipe", "fits"),
    [
        ((8, 0), "tensorwise", False),
        ((8, 9), "tensorwise", True),
        ((9, 0), "mxfp8", False),
        ((10, 0), "mxfp8", True),
    ],
)
def test_a_gpu_without_fp8_is_an_error(capability, recipe, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    record = fa.transforms.Float8(
        recipe=recipe, backend="transformer_engine" if recipe == "mxfp8" else "torchao"
    )
    if fits:
        check_device(CUDA, record)
        return
    with pytest.raises(
        errors.CapabilityError, match=f"capability {capability[0]}.{capability[1]}, and {recipe} needs"
    ):
        check_device(CUDA, record)


def test_amd_goes_by_architecture(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for arch, fits in (("gfx942:sramecc+", True), ("gfx90a", False)):
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device, arch=arch: types.SimpleNamespace(gcnArchName=arch),
        )
        with contextlib.nullcontext() if fits else pytest.raises(errors.CapabilityError, match="gfx90a"):
            check_device(CUDA, fa.transforms.Float8())


def test_a_cpu_is_an_error_before_anything_is_built(world):
    def factory():
        raise AssertionError("built")

    with pytest.raises(errors.CapabilityError, match="computes on cpu") as caught:
        made("fp8", model=factory)
    assert "emulate=True" in caught.value.fix


def test_mistakes_are_named(world, monkeypatch):
    for options, error, words in (
        ({"backend": "te"}, errors.UnknownNameError, "transformer_engine"),
        ({"recipe": "tensorwide"}, errors.UnknownNameError, "tensorwise"),
        ({"recipe": "hybrid"}, errors.UnknownNameError, "torchao has no recipe"),
        ({"margin": 0}, errors.ArgumentError, "option of transformer_engine"),
        ({"backend": "transformer_engine", "emulate": True}, errors.ArgumentError, "option of torchao"),
        ({"recipe": "rowwise", "all_gather": True}, errors.ArgumentError, "one scale for each"),
        ({"backend": "transformer_engine", "recipe": "mxfp8", "margin": 1}, errors.ArgumentError, "no delayed"),
        ({"backend": "transformer_engine", "amax_history_len": 0}, errors.ArgumentError, "history"),
        ({"backend": "transformer_engine", "amax_compute_algo": "mean"}, errors.UnknownNameError, "most_recent"),
        ({"backend": "ms_amp"}, errors.CapabilityError, "msamp.initialize"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            fa.transforms.Float8(**options)
    with pytest.raises(errors.ArgumentError, match="recipe"):
        fa.with_precision(loss_fn, "bf16", recipe="rowwise")
    with pytest.raises(errors.UnknownNameError, match="did you mean 'fp8'"):
        fa.with_precision(loss_fn, "f8")
    with pytest.raises(errors.RepeatedTransformError):
        fa.with_precision(fa.with_precision(loss_fn, "bf16"), "fp8")
    with pytest.raises(errors.ArgumentError, match="matches no layer"):
        made(fp8(skip=("lm_head*",)))
    with pytest.raises(errors.CapabilityError, match="nothing of this model"):
        made(fp8(only=("head",)))
    with pytest.raises(errors.CapabilityError, match="nothing is sharded"):
        made(fp8(all_gather=True))
    plain = made("bf16")
    plain.init()
    with pytest.raises(errors.ArgumentError, match="no layer"):
        fa.transforms.float8_layers(plain)
    early = made(fp8(), step=fa.remat(loss_fn, units=("Linear",)))
    with pytest.raises(errors.CapabilityError, match="would lose them"):
        early.init()
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(errors.MissingBackendError, match="quantize"):
        made(fp8())


def hooked():
    net = Net()
    net.blocks[0].register_forward_hook(lambda layer, args, out: out)
    return net


def test_hooks_of_a_layer_are_not_lost(world):
    train_step = made(fp8(), model=hooked)
    with pytest.raises(errors.CapabilityError, match="hooks of its own"):
        train_step.init()
    assert made(fp8(skip="blocks.0"), model=hooked).init().step == 0


def test_a_captured_step_does_not_send_fp8(world, monkeypatch):
    monkeypatch.setattr(_torch, "local_of", lambda value: value._local_tensor._tensor)
    with pytest.raises(errors.CapabilityError, match="captured"):
        made(fp8(all_gather=True), "fsdp", step=fa.compile(loss_fn, "step"))


class Recorder:
    """Stands for TransformerEngine: its layers compute in fp32 and write down how they were made."""

    def __init__(self):
        self.calls = []
        recorder = self

        class Linear(nn.Linear):
            def __init__(self, inputs, outputs, *, bias, params_dtype, device):
                recorder.calls.append(("Linear", inputs, outputs, bias, params_dtype, device))
                super().__init__(inputs, outputs, bias=bias, dtype=params_dtype, device=device)

            def forward(self, x):
                recorder.calls.append(("forward", recorder.depth))
                return super().forward(x)

        class LayerNorm(nn.LayerNorm):
            def __init__(self, shape, *, eps, params_dtype, device):
                recorder.calls.append(("LayerNorm", shape, eps, params_dtype, device))
                super().__init__(shape, eps=eps, dtype=params_dtype, device=device)

        self.depth = 0
        self.pytorch = types.ModuleType("transformer_engine.pytorch")
        self.pytorch.Linear, self.pytorch.LayerNorm = Linear, LayerNorm
        self.recipe = types.ModuleType("transformer_engine.common.recipe")
        self.recipe.Format = types.SimpleNamespace(HYBRID="HYBRID", E4M3="E4M3")
        self.recipe.DelayedScaling = lambda **options: ("DelayedScaling", options)
        self.recipe.MXFP8BlockScaling = lambda **options: ("MXFP8BlockScaling", options)

    @contextlib.contextmanager
    def context(self, **options):
        self.calls.append(("autocast", options))
        self.depth += 1
        yield
        self.depth -= 1


@pytest.fixture
def engine(monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", recorder.pytorch)
    monkeypatch.setitem(
        sys.modules, "transformer_engine.common", types.ModuleType("transformer_engine.common")
    )
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recorder.recipe)
    monkeypatch.setattr("fnaccel.transforms.float8.record.check_device", lambda device, record: None)
    return recorder


@pytest.mark.parametrize("name", ["autocast", "fp8_autocast"])
def test_transformer_engine_is_called_as_it_asks(name, engine, world):
    setattr(engine.pytorch, name, engine.context)
    x, y = digits()
    record = fa.transforms.Float8(
        backend="transformer_engine",
        recipe="e4m3",
        amax_history_len=16,
        amax_compute_algo="most_recent",
        margin=1,
    )
    train_step = made(record)
    assert "in fp8: blocks.0-1" in str(train_step.plan)
    assert "e4m3, delayed scaling: most_recent of 16, margin 1" in str(train_step.plan)
    assert "no part of the state" in str(train_step.plan)
    assert engine.calls == []
    state = train_step.init(seed=0)
    linear = ("Linear", 64, 64, True, torch.float32, "meta")
    norm = ("LayerNorm", 64, 1e-5, torch.float32, "meta")
    assert sorted(map(str, engine.calls)) == sorted(map(str, [linear, linear, norm]))
    assert set(state.params) == {name for name, _ in Net().named_parameters()}
    engine.calls.clear()
    before = fa.snapshot(state)
    state, _ = train_step(state, (x[:64], y[:64]))
    options = {
        "margin": 1, "fp8_format": "E4M3", "amax_history_len": 16, "amax_compute_algo": "most_recent",
    }  # fmt: skip
    key = "recipe" if name == "autocast" else "fp8_recipe"
    context = ("autocast", {"enabled": True, key: ("DelayedScaling", options)})
    assert engine.calls == [context, ("forward", 1), ("forward", 1)]
    assert not torch.equal(before.params["blocks.0.weight"], state.params["blocks.0.weight"])


def test_transformer_engine_keeps_values_and_knows_mxfp8(engine, world):
    engine.pytorch.autocast = engine.context
    x, y = digits()
    losses = []
    for precision in ("bf16", fa.transforms.Float8(backend="transformer_engine", recipe="mxfp8")):
        train_step = made(precision)
        _, metrics = train_step(train_step.init(seed=0), (x[:64], y[:64]))
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1]
    assert (
        "autocast",
        {"enabled": True, "recipe": ("MXFP8BlockScaling", {"fp8_format": "E4M3"})},
    ) in engine.calls


def test_transformer_engine_that_is_not_there(world, monkeypatch):
    monkeypatch.setattr("fnaccel.transforms.float8.record.check_device", lambda device, record: None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(errors.MissingBackendError, match="TransformerEngine"):
        made(fa.transforms.Float8(backend="transformer_engine"))
