"""Ordinary use that failed with a raw error: it works, or the error names what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params


@pytest.fixture
def world():
    with fa.start(device="cpu") as started:
        yield started


class TestSchedulers:
    @pytest.mark.parametrize("kind", [lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR])
    def test_what_changes_momentum_too_raises_and_names_the_option(self, kind):
        options = (
            {"max_lr": 0.1, "total_steps": 10}
            if kind is lr_scheduler.OneCycleLR
            else {"base_lr": 0.01, "max_lr": 0.1}
        )
        with pytest.raises(errors.CapabilityError, match="besides the rate") as caught:
            fa.schedules.from_torch_scheduler(lambda optimizer: kind(optimizer, **options), lr=0.1)
        assert "cycle_momentum=False" in str(caught.value)
        schedule = fa.schedules.from_torch_scheduler(
            lambda optimizer: kind(optimizer, cycle_momentum=False, **options), lr=0.1
        )
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        reference = kind(optimizer, cycle_momentum=False, **options)
        for update in range(9):
            assert schedule(update) == pytest.approx(optimizer.param_groups[0]["lr"])
            optimizer.step()
            reference.step()

    def test_a_scheduler_of_a_users_own_that_changes_weight_decay_raises(self):
        class Decaying(lr_scheduler.LRScheduler):
            def get_lr(self):
                self.optimizer.param_groups[0]["weight_decay"] *= 0.5 if self.last_epoch else 1.0
                return [0.1]

        schedule = fa.schedules.from_torch_scheduler(Decaying, lr=0.1)
        with pytest.raises(errors.CapabilityError, match="weight_decay besides the rate"):
            schedule(1)

    def test_what_steps_by_a_metric_raises(self):
        class Plateaued:
            def __init__(self, optimizer):
                pass

            def step(self, metric):
                pass

        for kind in (lr_scheduler.ReduceLROnPlateau, Plateaued):
            with pytest.raises(errors.ArgumentError, match="needs a metric"):
                fa.schedules.from_torch_scheduler(kind, lr=0.1)


class TestOptimizers:
    def test_what_evaluates_the_loss_by_itself_raises(self):
        class Searching(torch.optim.Optimizer):
            def step(self, closure):
                return closure()

        for kind in (torch.optim.LBFGS, Searching):
            with pytest.raises(errors.ArgumentError, match="evaluates the loss several times"):
                fa.optim.from_torch(kind, lr=0.1)

    @pytest.mark.parametrize(("kind", "name"), [(fa.sgd, "SGD"), (fa.adam, "Adam"), (fa.adamw, "AdamW")])
    def test_options_that_only_torch_has_and_misspelt_ones(self, kind, name):
        with pytest.raises(errors.ConfigError, match=f"torch.optim.{name}") as caught:
            kind(0.1, maximize=True)
        assert "fa.optim.from_torch(torch.optim." in caught.value.fix
        with pytest.raises(errors.ConfigError, match="did you mean 'weight_decay'"):
            kind(0.1, weight_decai=0.1)

    def test_an_error_names_the_class_that_failed(self, world):
        class Mine(torch.optim.SGD):
            def step(self, closure=None):
                raise RuntimeError("only matrices")

        with pytest.raises(errors.CapabilityError, match="only matrices") as caught:
            program(optimizer=fa.optim.from_torch(Mine, lr=0.1)).init()
        assert "Mine can't update these parameters" in caught.value.what
        assert "torch.optim.Mine" not in caught.value.what
        assert "unsharded" not in caught.value.fix

    def test_a_dict_of_optimizers_for_one_model(self, world):
        with pytest.raises(errors.ArgumentError, match="there is one model, without a key"):
            program(optimizer={"net": fa.sgd(0.1)})

    def test_freezing_everything_says_so(self, world):
        with pytest.raises(errors.ArgumentError, match="no parameter is left to train"):
            program(frozen="*").init()


class TestDtypes:
    @pytest.mark.parametrize("dtype", ["bf16", "fp64"])
    def test_a_policy_of_one_dtype_casts_the_batch(self, world, dtype):
        step = fa.with_precision(loss_fn, fa.transforms.Precision(param=dtype, compute=dtype))
        train_step = program(step)
        state, metrics = train_step(train_step.init(), batch_of(4))
        plain = program()
        _, wanted = plain(plain.init(), batch_of(4))
        close = {"bf16": 0.05, "fp64": 1e-5}[dtype]
        assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), abs=close)
        scores = train_step.look(state, lambda model, x: model(x), batch_of(4)[0])
        assert scores.shape == (4, 1)
        assert train_step.look(state, lambda model: sum(p.numel() for p in model.parameters())) > 0

    def test_modules_in_another_dtype_than_the_batch(self, world):
        train_step = program(model=lambda: Net().bfloat16())
        state = train_step.init()
        with pytest.raises(errors.LossError, match="parameters are bfloat16") as caught:
            train_step(state, batch_of(4))
        assert "Precision(param" in caught.value.fix
        assert train_step.live_state is state

    @pytest.mark.parametrize("scope", [None, "step"])
    def test_gradients_are_exact_in_fp64(self, world, scope):
        torch.set_default_dtype(torch.float64)
        try:
            x, y = (tensor.double() for tensor in batch_of(7))
            step = fa.clip_norm(fa.accumulate(loss_fn, 3), 0.01)
            step = step if scope is None else fa.compile(step, scope, backend="eager")
            train_step = program(step)
            state, metrics = train_step(train_step.init(), (x, y))
            torch.manual_seed(0)
            net = Net()
            loss = ((net(x) - y) ** 2).sum() / 7
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            assert float(metrics["grad_norm"]) == pytest.approx(float(norm), abs=1e-12)
            for name, param in net.named_parameters():
                wanted = param.detach() - 0.1 * param.grad
                assert torch.allclose(state.params[name].detach(), wanted, atol=1e-9, rtol=0)
        finally:
            torch.set_default_dtype(torch.float32)


class TestModels:
    @pytest.mark.parametrize("family", ["gpt2", "llama"])
    def test_remat_of_transformers_models_as_they_come(self, world, family):
        import transformers

        def gpt2():
            config = transformers.GPT2Config(
                n_layer=2, n_head=2, n_embd=16, vocab_size=23, n_positions=8, bos_token_id=0, eos_token_id=0
            )
            config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
            return transformers.GPT2LMHeadModel(config)

        def llama():
            return transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    hidden_size=16,
                    intermediate_size=24,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    vocab_size=23,
                )
            )

        def loss(model, batch):
            return model(**batch).loss

        tokens = torch.arange(12).view(2, 6)
        batch = {"input_ids": tokens, "labels": tokens}
        make = {"gpt2": gpt2, "llama": llama}[family]
        states = []
        for step in (loss, fa.remat(loss)):
            train_step = program(step, model=make)
            state, _ = train_step(train_step.init(), batch)
            states.append(whole_params(state))
            generated = train_step.look(
                state, lambda model: model.generate(tokens[:, :2], max_new_tokens=3, do_sample=False)
            )
            assert generated.shape == (2, 5)
        for name, value in states[0].items():
            assert torch.allclose(value, states[1][name], atol=1e-6)

    def test_outputs_of_transformers_are_batches(self, world):
        from transformers.modeling_outputs import BaseModelOutput

        def loss(model, batch):
            assert isinstance(batch, BaseModelOutput)
            return fa.Mean(model(batch.last_hidden_state).sum(), weight=len(batch.last_hidden_state))

        batch = BaseModelOutput(last_hidden_state=torch.randn(6, 3))
        train_step = program(fa.accumulate(loss, 2))
        _, metrics = train_step(train_step.init(), batch)
        assert metrics["weight"] == 6

    def test_a_dict_of_losses_names_the_one_that_is_meant(self, world):
        train_step = program(lambda m, b: {"loss": m(b[0]).sum(), "logits": m(b[0])})
        with pytest.raises(errors.LossError, match="returned dict") as caught:
            train_step(train_step.init(), batch_of(4))
        assert 'did you mean output["loss"]?' in caught.value.fix

    def test_compile_takes_the_backends_options(self, world):
        step = fa.compile(loss_fn, "loss", backend="inductor", options={"no_such_option": 1})
        with pytest.raises(errors.ArgumentError, match="no_such_option"):
            program(step)
        assert "options=" in str(program(fa.compile(loss_fn, "loss", options={"max_autotune": False})).plan)


def different_models():
    class Wide(Net):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 1, bias=current().rank == 0)

    program(model=Wide, strategy="ddp").init()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_models_that_differ_by_rank_raise(pools, strategy):
    with pytest.raises(
        errors.PlanMismatchError, match=r"different models: out.bias: \[1\] torch.float32 and missing"
    ):
        pools.run(2, different_models)


def no_units():
    train_step = program(strategy=fa.fsdp(units=None))
    _, metrics = train_step(train_step.init(), batch_of(4))
    return float(metrics["loss"])


def test_units_none_is_one_unit(pools):
    losses = pools.run(2, no_units)
    assert losses[0] == losses[1]


def looked(folder):
    train_step = program(fa.with_precision(loss_fn, "bf16"), strategy="fsdp")
    state, _ = train_step(train_step.init(), batch_of(4))
    values = whole_params(state)

    def written(model):
        torch.save(dict(model.state_dict()), f"{folder}/{current().rank}.pt")
        return model(batch_of(4)[0]).shape

    assert train_step.look(state, written, whole=True) == (4, 1)
    saved = torch.load(f"{folder}/{current().rank}.pt")
    assert all(torch.equal(saved[name], value) for name, value in values.items())
    with pytest.raises(errors.CapabilityError, match="whole=True"):
        train_step.look(state, lambda model: model.blocks[0].mix.weight.detach().numpy())
    state, _ = train_step(state, batch_of(4))
    return float(train_step.look(state, lambda model, x: model(x).sum(), batch_of(4)[0]))


def test_look_shows_whole_parameters_if_asked(pools, tmp_path):
    first, second = pools.run(2, looked, str(tmp_path))
    assert first == second
