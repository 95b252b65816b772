"""Options of other axes and transforms, and several models, beside tensor parallelism."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel import errors
from tests.strategies.tensor.models import (
    CUT_LOGITS,
    GPT,
    HEADS,
    PLAN,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    Block,
    loss_fn,
    rows_of,
)
from tests.strategies.tensor.test_transformers import gpt2, llama
from tests.tiny_models import whole

STEPS = 2
WHOLE, CUT = fa.tensor(2, PLAN), fa.tensor(2, SEQUENCE, sequence=True)
BOTH = fa.fsdp(2) * fa.tensor(2, PLAN)


def params_of(state):
    """Whole parameters by path, of one model or of several."""
    return dict(fa.tree.items(fa.tree.map_tensors(whole, dict(state.params))))


def trained(strategy, step=loss_fn, model=GPT, optimizer=None):
    train_step = fa.train_step(step, model=fa.distribute(model, strategy), optimizer=optimizer or fa.sgd(0.1))
    state, losses = train_step.init(seed=0), []
    for number in range(STEPS):
        rows = rows_of(number, 0, rows=4).chunk(train_step.mesh.batch_size)[train_step.mesh.batch_rank]
        state, metrics = train_step(state, rows)
        losses.append(float(metrics["loss"]))
    return {"losses": torch.tensor(losses), "params": params_of(state)}


def check_same(pools, ranks, strategy, *args):
    """Losses and parameters of the ranks are those of one process."""
    expected = pools.run(1, trained, "local", *args)[0]
    for found in pools.run(ranks, trained, strategy, *args):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class DropoutBlock(Block):
    """Drops features between column and row layers."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(len(x), -1, 3, self.heads, WIDTH // HEADS).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, self.drop(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.drop(F.gelu(self.up(self.norm2(x)))))


class DropoutGPT(GPT):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(DropoutBlock() for _ in range(3))


@pytest.mark.long_except("attention")
@pytest.mark.parametrize("save", ["nothing", "attention", "matmuls"])
def test_blocks_that_run_again_drop_the_same_features(pools, save):
    """A block that is computed again stops before its row layer ends, and the next one draws as before."""
    first = pools.run(2, trained, fa.tensor(2, PLAN), loss_fn, DropoutGPT)[0]
    again = pools.run(2, trained, fa.tensor(2, PLAN), fa.remat(loss_fn, save=save), DropoutGPT)[0]
    torch.testing.assert_close(again, first, rtol=0, atol=0)


class Failing(DropoutGPT):
    """Raises between a column and a row layer if `fails` is set."""

    fails = False

    def __init__(self):
        super().__init__()
        self.blocks[1].drop.register_forward_pre_hook(self.check)

    def check(self, *_):
        if Failing.fails:
            Failing.fails = False
            raise RuntimeError("no memory")


def trained_again():
    """Losses of a run in which a step raised and was called again, and of one that did not."""
    runs = []
    for fails in (False, True):
        train_step = fa.train_step(loss_fn, model=fa.distribute(Failing, WHOLE), optimizer=fa.sgd(0.1))
        state, losses = train_step.init(seed=0), []
        for number in range(STEPS):
            rows = rows_of(number, 0)
            Failing.fails = fails and number == 1
            with contextlib.suppress(RuntimeError):
                state, metrics = train_step(state, rows)
            if state.step == number:
                state, metrics = train_step(state, rows)
            losses.append(float(metrics["loss"]))
        runs.append((losses, params_of(state)))
    return runs


def test_a_step_that_failed_within_layers_runs_again(pools):
    """With the random numbers that it had."""
    for undisturbed, again in pools.run(2, trained_again):
        torch.testing.assert_close(again, undisturbed, rtol=0, atol=0)


def adapted():
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules=["q_proj", "o_proj"], r=2, init_lora_weights=False)
    return peft.get_peft_model(llama(), adapter)


ADAPTED = {
    "*.q_proj.base_layer": "colwise",
    "*.q_proj.lora_B.default": "colwise",
    "*.[kv]_proj": "colwise",
    "*.o_proj.base_layer": "rowwise",
    "*.o_proj.lora_A.default": "rowwise",
}


def logits_of(model, tokens):
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    total = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return fa.Mean(total, weight=tokens[:, 1:].numel())


@pytest.mark.long_except(r"^2-")
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(2, fa.tensor(2, ADAPTED)), (4, fa.fsdp(2) * fa.tensor(2, ADAPTED))]
)
def test_adapters(pools, ranks, strategy):
    """A plan names the layers in an adapter."""
    check_same(pools, ranks, strategy, logits_of, adapted)


class WithPlan(GPT):
    tp_plan = PLAN


def loss_of_both(models, tokens):
    result = loss_fn(models["lm"], tokens)
    return fa.Mean(result.total + models["other"](torch.ones(2, 3)).square().sum(), weight=result.weight)


def logits_of_gpt2(models, tokens):
    return logits_of(models["lm"], tokens)


def loss_of_one(models, tokens):
    return loss_fn(models["lm"], tokens)


def linear():
    return nn.Linear(3, 4)


NAMED = {f"lm/{pattern}": style for pattern, style in PLAN.items()}


@pytest.mark.parametrize(
    ("strategy", "step", "model"),
    [
        (fa.tensor(2, NAMED), loss_of_both, {"lm": GPT, "other": linear}),
        (fa.tensor(2), loss_of_one, {"lm": WithPlan}),
        (fa.tensor(2), logits_of_gpt2, {"lm": gpt2}),
        (fa.tensor(2, "gpt2"), logits_of_gpt2, {"lm": gpt2}),
    ],
    ids=["paths", "own plan", "auto", "gpt2"],
)
def test_a_dict_of_models(pools, strategy, step, model):
    """A plan given as a dict names the model first. A ready plan, or the model's own, does not."""
    check_same(pools, 2, strategy, step, model)


def test_two_patterns_for_one_attribute(pools):
    """The first one divides it, and the second one does not divide it again."""
    check_same(pools, 2, fa.tensor(2, {"blocks.0.heads": "/"} | PLAN))


def imitate(student, tokens, given):
    gap = student(tokens[:, :-1]) - given["teacher"](tokens[:, :-1]).detach()
    return fa.Mean(gap.square().sum(), weight=tokens.numel())


def distilled(student_strategy, teacher_strategy):
    """A student that borrows a teacher, which trains too. The error of the first call, if it raises."""
    student = fa.train_step(imitate, model=fa.distribute(GPT, student_strategy), optimizer=fa.sgd(0.1))
    teacher = fa.train_step(loss_fn, model=fa.distribute(GPT, teacher_strategy), optimizer=fa.sgd(0.1))
    mine, lent, losses = student.init(seed=0), teacher.init(seed=1), []
    for number in range(STEPS):
        part = rows_of(number, 0, rows=4).chunk(student.mesh.batch_size)[student.mesh.batch_rank]
        try:
            mine, metrics = student(mine, part, given={"teacher": lent})
        except errors.CapabilityError as error:
            return str(error)
        losses.append(float(metrics["loss"]))
        part = rows_of(number, 1, rows=4).chunk(teacher.mesh.batch_size)[teacher.mesh.batch_rank]
        lent, metrics = teacher(lent, part)
        losses.append(float(metrics["loss"]))
    return {"losses": torch.tensor(losses), "student": params_of(mine), "teacher": params_of(lent)}


@pytest.mark.long_except(r"^2-")
@pytest.mark.parametrize(
    ("ranks", "student", "teacher"),
    [
        (2, fa.tensor(2, PLAN), fa.tensor(2, PLAN)),
        (2, fa.tensor(2, PLAN), fa.fsdp()),
        (4, fa.ddp(2) * fa.tensor(2, PLAN), BOTH),
        (4, fa.tensor(4, PLAN), fa.ddp(2) * fa.tensor(2, PLAN)),
    ],
)
def test_a_lent_model(pools, ranks, student, teacher):
    expected = pools.run(1, distilled, "local", "local")[0]
    for found in pools.run(ranks, distilled, student, teacher):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("ranks", "student", "teacher"),
    [(2, "fsdp(2)", fa.tensor(2, PLAN)), (4, fa.ddp(2) * fa.tensor(2, PLAN), fa.tensor(4, PLAN))],
)
def test_a_lent_model_reads_the_same_rows_on_its_ranks(pools, ranks, student, teacher):
    """Otherwise it would add up activations of different rows."""
    for text in pools.run(ranks, distilled, student, teacher):
        assert "whose ranks must compute with the same rows" in text
        assert "fix: this train step under fa.tensor(" in text


class HalfUsed(GPT):
    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks[0](x)))


OPTIONS = {
    "static_graph": (fa.ddp(2, static_graph=True) * WHOLE, GPT),
    "unused_parameters": (fa.ddp(2, unused_parameters=True) * WHOLE, HalfUsed),
    "unused, tensor alone": (WHOLE, HalfUsed),
    "unused, fsdp": (BOTH, HalfUsed),
    "bucket_mb": (fa.ddp(2, bucket_mb=0.0001) * CUT, GPT),
    "ignore": (fa.fsdp(2, ignore=("head.*", "blocks.0.*")) * CUT, GPT),
    "units": (fa.fsdp(2, units=None) * WHOLE, GPT),
    "kept": (fa.fsdp(2, reshard_after_forward=False) * CUT, GPT),
    "offload": (fa.fsdp(2, offload=True) * CUT, GPT),
    "the other order": (WHOLE * fa.fsdp(2), GPT),
    "the other ranks": (fa.fsdp() * fa.tensor(2, PLAN), GPT),
}


@pytest.mark.long_except(r"unused, fsdp|offload")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_other_axis(pools, name):
    strategy, model = OPTIONS[name]
    check_same(pools, 2 if strategy == WHOLE else 4, strategy, loss_fn, model)


ODD_PLAN = {"embed": "vocab", "up": "colwise", "down": "rowwise", "head": "vocab"}


class Odd(nn.Module):
    """Sizes for three ranks, and a vocabulary that they do not divide."""

    tp_plan = ODD_PLAN

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 9), nn.Linear(9, VOCABULARY)
        self.up, self.down = nn.Linear(9, 12), nn.Linear(12, 9)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(torch.relu(self.up(x))))


def double():
    return GPT().double()


def test_cut_logits_in_double_precision(pools):
    expected = pools.run(1, trained, "local", loss_fn, double)[0]
    for found in pools.run(2, trained, fa.tensor(2, CUT_LOGITS), loss_fn, double):
        torch.testing.assert_close(found["params"], expected["params"], atol=1e-12, rtol=1e-10)


def test_three_ranks(pools):
    check_same(pools, 3, fa.tensor(), loss_fn, Odd)


def started_without_values(strategy, folder=None):
    """One step from a checkpoint of seed 0, which the first call writes."""
    train_step = fa.train_step(loss_fn, model=fa.distribute(GPT, strategy), optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    if fa.checkpoint.latest(folder) is None:
        fa.save(folder, state)
    state = fa.restore(folder, like=state)
    part = rows_of(0, 0, rows=4).chunk(train_step.mesh.batch_size)[train_step.mesh.batch_rank]
    state, metrics = train_step(state, part)
    return {"loss": torch.tensor(float(metrics["loss"])), "params": params_of(state)}


@pytest.mark.parametrize("offload", [False, True])
def test_a_model_without_values_is_restored(pools, tmp_path, offload):
    expected = pools.run(1, started_without_values, "local", tmp_path)[0]
    strategy = fa.fsdp(2, init="meta", offload=offload) * WHOLE
    for found in pools.run(4, started_without_values, strategy, tmp_path):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
