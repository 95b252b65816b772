"""Models that are built in unusual ways: shared, lazy, or with buffers that appear while they run."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
import fnaccel.track
from fnaccel import errors
from tests.tiny_models import Net, batch_of, loss_fn, program


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


class Head(nn.Module):
    """A layer of its own behind an encoder that others may hold too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(self.encoder(x))


class TestSharedModules:
    @pytest.mark.parametrize("strategy", ["local", "ddp(hook='bf16')"])
    @pytest.mark.parametrize("options", [{}, {"frozen": "encoder.*"}, {"no optimizer": True}])
    @pytest.mark.parametrize("first_is_plain", [True, False])
    def test_a_part_that_is_trained_belongs_to_one_train_step(self, strategy, options, first_is_plain):
        """Frozen by one of the two, or while one is lent, the encoder was trained by neither, in silence."""
        encoder = nn.Linear(3, 6)

        def made(options):
            options = dict(options)
            optimizer = None if options.pop("no optimizer", False) else fa.sgd(0.1)
            model = fa.distribute(Head(encoder), strategy)
            return fa.train_step(loss_fn, model=model, optimizer=optimizer, **options)

        pair = [made({}), made(options)] if first_is_plain else [made(options), made({})]
        first = pair[0].init()
        with pytest.raises(
            errors.OwnershipError, match=r"encoder\.weight, encoder\.bias is a parameter of a"
        ):
            pair[1].init()
        if first_is_plain:
            before = encoder.weight.detach().clone()
            pair[0](first, batch_of(4))
            assert not torch.equal(before, encoder.weight)
        pair[0].close()
        pair[1].init()

    def test_a_frozen_part_may_be_shared(self):
        encoder = nn.Linear(3, 6).requires_grad_(False)
        steps = [program(model=Head(encoder)) for _ in range(2)]
        states = [step.init() for step in steps]
        for step, state in zip(steps, states, strict=True):
            before = step.look(state, lambda model: model.out.weight.clone())
            state, _ = step(state, batch_of(4))
            assert not torch.equal(before, state.params["out.weight"])

    def test_a_train_step_that_is_gone_shares_nothing(self):
        encoder = nn.Linear(3, 6)
        program(model=Head(encoder)).init()
        gc.collect()
        step = program(model=Head(encoder))
        step(step.init(), batch_of(4))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.LazyLinear(6)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.inp(x)))


class TestLazyModules:
    @pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp", "fsdp(init='meta')"])
    def test_one_that_has_not_run_is_named(self, strategy):
        with pytest.raises(errors.ArgumentError, match=r"Lazy is lazy, and has not run: inp\.weight, inp"):
            program(model=Lazy, strategy=strategy).init()

    @pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
    def test_one_that_ran_in_its_factory_is_trained(self, strategy):
        def make():
            model = Lazy()
            model(batch_of(1)[0])
            return model

        step = program(model=make, strategy=strategy)
        state, _ = step(step.init(), batch_of(4))
        assert state.params["inp.weight"].shape == (6, 3)
        step.close()


class Late(Net):
    """Its first forward makes a buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "none before":
            self.register_buffer("center", None)
        if how == "not saved, none before":
            self.register_buffer("center", None, persistent=False)

    def forward(self, x):
        if getattr(self, "center", None) is None:
            if "none before" in self.how:
                self.center = x.detach().mean(0)
            else:
                self.register_buffer("center", x.detach().mean(0), persistent=self.how == "registered")
        return super().forward(x - self.center)


class TestBuffersThatAppear:
    @pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
    @pytest.mark.parametrize("how", ["none before", "registered"])
    @pytest.mark.parametrize("use", ["step", "save", "snapshot"])
    def test_one_that_the_state_lacks_is_named(self, how, use, strategy, tmp_path):
        step = program(model=lambda: Late(how), strategy=strategy)
        state, _ = step(step.init(), batch_of(4))
        uses = {
            "step": lambda: step(state, batch_of(4)),
            "save": lambda: fa.save(tmp_path, state),
            "snapshot": lambda: fa.snapshot(state),
        }
        with pytest.raises(errors.ReplacedParameterError, match="the buffer center was added"):
            uses[use]()
        step.close()

    @pytest.mark.parametrize("how", ["not saved", "not saved, none before"])
    def test_one_that_need_not_be_saved_is_left_alone(self, how, tmp_path):
        step = program(model=lambda: Late(how))
        state, _ = step(step.init(), batch_of(4))
        state, _ = step(state, batch_of(4))
        fa.save(tmp_path, state)


class Resized(nn.Module):
    """Its first forward gives a buffer its size, as the observers of torch.ao do."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.register_buffer("lowest", torch.zeros(0))

    def forward(self, x):
        if not self.lowest.numel():
            self.lowest.resize_(3)
            self.lowest.fill_(9.0)
        self.lowest.copy_(torch.minimum(self.lowest, x.detach().amin(dim=0)))
        return self.net(x)


@pytest.mark.parametrize("before", ["nothing", "a failure", "a check"])
def test_a_buffer_that_the_first_forward_resizes(before):
    calls = []

    def fails_first(model, batch):
        loss = loss_fn(model, batch)
        calls.append(1)
        if before == "a failure" and len(calls) == 1:
            raise KeyError("once")
        return loss

    train_step = program(fails_first, model=Resized)
    state, (x, y) = train_step.init(), batch_of(4)
    if before == "a failure":
        with pytest.raises(KeyError):
            train_step(state, (x, y))
    if before == "a check":
        train_step.check_totals(state, loss_fn, (x, y))
    assert state.buffers["lowest"].shape == (0,)
    state, _ = train_step(state, (x, y))
    assert torch.equal(state.buffers["lowest"], x.amin(dim=0))


def test_a_model_that_is_compiled_in_its_factory_has_plain_paths_and_stays_compiled(tmp_path):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def compiled():
        model = Net()
        model.blocks[1] = torch.compile(model.blocks[1], backend=backend)
        return model

    plain = program().init()
    for make in (compiled, lambda: torch.compile(compiled(), backend=backend)):
        torch.compiler.reset()
        graphs.clear()
        train_step = program(model=make, frozen=["blocks.1.*"])
        state = train_step.init()
        assert list(state.params) == list(plain.params)
        train_step.look(state, lambda model: model(batch_of(4)[0]))
        assert graphs
        fa.restore(fa.save(tmp_path / str(make), state), like=program(frozen=["blocks.1.*"]).init())


class TestWrongArguments:
    @pytest.mark.parametrize(
        ("use", "said"),
        [
            (lambda step, state, data: fa.scan(step, None, data), "this is NoneType, not the state"),
            (lambda step, state, data: fa.scan(step, step(state, batch_of(4)), data), "this is tuple"),
            (lambda step, state, data: step.adopt(None), "this is NoneType, not the state"),
            (lambda step, state, data: step.adopt(state.params), "this is ReadOnlyDict, not the state"),
            (lambda step, state, data: fa.evaluate(step, None, loss_fn, data, ema=True), "this is NoneType"),
            (lambda step, state, data: step.averaged(state).__enter__(), "no averaged parameters"),
            (lambda step, state, data: step(state, batch_of(4), given=[state]), "given is list, not a dict"),
            (lambda step, state, data: fa.scan(step, state, data, track=3), "int is no tracker"),
            (lambda step, state, data: fa.scan(step, state, data, track=[print]), "is no tracker"),
            (
                lambda step, state, data: fa.scan(step, state, data, track=[fa.track.JsonlTracker]),
                "the class JsonlTracker is no tracker",
            ),
        ],
    )
    def test_what_is_wrong_is_named_at_the_call(self, use, said):
        step = program()
        data = fa.shard(DataLoader(TensorDataset(*batch_of(8)), batch_size=4))
        with pytest.raises(errors.ArgumentError, match=said):
            use(step, step.init(), data)
