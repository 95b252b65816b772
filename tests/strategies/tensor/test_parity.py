"""Tensor parallelism against plain PyTorch on one process: losses, norms, parameters, collectives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel.testing import count_collectives, oracle_run
from tests.strategies.tensor.models import (
    CUT_LOGITS,
    DIMS,
    GPT,
    LENGTH,
    PLAN,
    SEQUENCE,
    VOCABULARY,
    loss_fn,
    rows_of,
)
from tests.tiny_models import whole_params

STEPS, RATE, CLIP = 3, 0.3, 0.5


def one(n, plan=PLAN, **options):
    return fa.tensor(n, plan, **options)


def trained(strategy, *, precision="fp32", remat=None, compiled=False, micro_batches=2):
    step = fa.with_precision(loss_fn, precision)
    if remat is not None:
        step = fa.remat(step, save=remat)
    step = fa.clip_norm(fa.accumulate(step, micro_batches), CLIP)
    if compiled:
        step = fa.compile(step, "step", backend="aot_eager")
    train_step = fa.train_step(step, model=fa.distribute(GPT, strategy), optimizer=fa.sgd(RATE))
    state = train_step.init(seed=0)
    losses, norms, counts = [], [], {}
    for number in range(STEPS):
        batch = rows_of(number, train_step.mesh.batch_rank)
        if number == 1 and not compiled:
            with count_collectives() as counted:
                state, metrics = train_step(state, batch)
            counts = dict(counted.counts)
        else:
            state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return losses, norms, whole_params(state), counts, train_step.mesh.batch_size


ROWS = {
    "tensor": (2, one(2), {}),
    "dimensions": (2, one(2, DIMS), {}),
    "cut logits": (2, one(2, CUT_LOGITS), {}),
    "sequence": (2, one(2, SEQUENCE, sequence=True), {}),
    "the plan of sequences, whole": (2, one(2, SEQUENCE), {}),
    "bf16": (2, one(2), {"precision": "bf16"}),
    "remat": (2, one(2), {"remat": "nothing"}),
    "sequence, remat of all but attention": (2, one(2, SEQUENCE, sequence=True), {"remat": "attention"}),
    "captured": (2, one(2), {"compiled": True}),
    "captured sequence": (2, one(2, SEQUENCE, sequence=True), {"compiled": True}),
    "captured cut logits": (2, one(2, CUT_LOGITS), {"compiled": True}),
    "four ranks": (4, one(4), {}),
    "ddp": (4, fa.ddp(2) * one(2), {}),
    "ddp, sequence": (4, fa.ddp(2) * one(2, SEQUENCE, sequence=True), {}),
    "ddp with bf16 sent": (4, fa.ddp(2, hook="bf16") * one(2), {}),
    "fsdp": (4, fa.fsdp(2) * one(2), {}),
    "fsdp, sequence": (4, fa.fsdp(2) * one(2, SEQUENCE, sequence=True), {}),
    "fsdp, cut logits, remat": (4, fa.fsdp(2) * one(2, CUT_LOGITS), {"remat": "nothing"}),
    "fsdp, captured": (4, fa.fsdp(2) * one(2), {"compiled": True}),
    "hsdp": (8, fa.hsdp(2, 2) * one(2), {}),
    "ddp, fsdp, sequence": (8, fa.ddp(2) * fa.fsdp(2) * one(2, SEQUENCE, sequence=True), {}),
}  # fmt: skip


@pytest.mark.long_except(r"^(?!captured|fsdp, )")
@pytest.mark.parametrize("name", list(ROWS))
def test_parity(pools, name):
    """The loss, the norm that clips, and the parameters are those of one process."""
    ranks, strategy, options = ROWS[name]
    precision = options.get("precision", "fp32")
    parts = ranks // dict(strategy.degrees())["tp"]
    expected = oracle_run(
        GPT, loss_fn, [[rows_of(number, part) for part in range(parts)] for number in range(STEPS)],
        lr=RATE, clip=CLIP, precision=precision,
    )  # fmt: skip
    # bf16: a row layer rounds each rank's summand
    close = 2e-2 if precision == "bf16" or "bf16" in name else 1e-5
    for losses, norms, params, _, batch_size in pools.run(ranks, trained, strategy, **options):
        assert batch_size == parts
        assert losses == pytest.approx(expected.losses, abs=close)
        assert norms == pytest.approx(expected.grad_norms, abs=close)
        for key, value in expected.params.items():
            torch.testing.assert_close(params[key], value, atol=close, rtol=close)


def test_two_and_two_all_reduces_for_each_layer(pools):
    """Two layers, one micro-batch: 8 for layers, 1 for the embedding, 1 for the head, 1 for the norm."""
    for *_, counts, _ in pools.run(2, trained, one(2), micro_batches=1):
        assert counts == {"all_reduce": 2 * 4 + 3, "all_gather": 1}
    for *_, counts, _ in pools.run(2, trained, one(2, CUT_LOGITS), micro_batches=1):
        # the logits stay: a maximum, and the sums of exponents and targets
        assert counts == {"all_reduce": 2 * 4 + 3 + 2}


class Apart(nn.Module):
    """Query, key and value are layers of their own, which take the same activation."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.first = nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def counted_apart():
    plan = {"[qkv]": "colwise", "o": "rowwise"}
    train_step = fa.train_step(
        lambda model, x: model(x).square().mean(),
        model=fa.distribute(Apart, one(2, plan)),
        optimizer=fa.sgd(0.1),
    )
    state, _ = train_step(train_step.init(), torch.ones(2, 3, 8))
    with count_collectives() as counted:
        train_step(state, torch.ones(2, 3, 8))
    return dict(counted.counts)


def test_layers_apart_share_the_copy_of_their_input(pools):
    """One all-reduce in forward, one in backward for query, key and value together."""
    assert pools.run(2, counted_apart) == [{"all_reduce": 2}] * 2


def test_sequences_reduce_scatter_and_all_gather(pools):
    """In the place of all-reduces. One all-reduce adds the gradients of norms and biases."""
    for *_, counts, _ in pools.run(2, trained, one(2, SEQUENCE, sequence=True), micro_batches=1):
        assert counts["reduce_scatter"] == 2 * 4
        assert counts["all_gather"] == 2 * 4 + 3  # and at both ends of the blocks, and the logits
        assert counts["all_reduce"] == 4  # the embedding, the head, partial gradients, the norm


def saved(strategy, folder, optimizer, like=None, steps=2):
    step = fa.clip_norm(fa.with_ema(loss_fn, 0.5), CLIP)
    train_step = fa.train_step(step, model=fa.distribute(GPT, strategy), optimizer=optimizer)
    state = train_step.init(seed=0 if like is None else 1)
    if like is not None:
        state = fa.restore(like, like=state)
    for number in range(steps):
        state, _ = train_step(state, rows_of(number, train_step.mesh.batch_rank))
    if folder is not None:
        fa.save(folder, state)

    def whole(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()

    return whole_params(state), *(fa.tree.map_tensors(whole, dict(part)) for part in (state.opt, state.ema))


@pytest.mark.long
@pytest.mark.parametrize("other", ["local()", "ddp(2)", "fsdp(3)", "fsdp(2) * tensor(2)", "tensor(2)"])
@pytest.mark.parametrize("source", ["fsdp", "sequence", "ddp"])
def test_checkpoints_go_to_any_layout_and_back(pools, tmp_path, other, source):
    """Parameters, slots and averages, bit for bit, from 4 ranks to other layouts and back."""
    first = {
        "fsdp": fa.fsdp(2) * one(2),
        "sequence": fa.fsdp(2) * one(2, SEQUENCE, sequence=True),
        "ddp": fa.ddp(2) * one(2, CUT_LOGITS),
    }[source]
    second = eval(other, {"local": fa.local, "ddp": fa.ddp, "fsdp": fa.fsdp, "tensor": one})
    ranks = {"local()": 1, "ddp(2)": 2, "fsdp(3)": 3, "tensor(2)": 2}.get(other, 4)
    optimizer = fa.adamw(0.01)
    before = pools.run(4, saved, first, tmp_path / "a", optimizer)[0]
    for found in pools.run(ranks, saved, second, None, optimizer, tmp_path / "a", 0):
        assert fa.tree.allclose(found, before, rtol=0, atol=0)
    if source != "fsdp":
        return
    before = pools.run(ranks, saved, second, tmp_path / "b", optimizer)[0]
    for found in pools.run(4, saved, first, None, optimizer, tmp_path / "b", 0):
        assert fa.tree.allclose(found, before, rtol=0, atol=0)


@pytest.mark.long
def test_each_piece_is_written_once(pools, tmp_path):
    """Packed matrices are several blocks of one file."""
    pools.run(4, saved, fa.fsdp(2) * one(2), tmp_path, fa.adamw(0.01))
    text = (fa.checkpoint.latest(tmp_path) / "manifest.json").read_text()
    assert '"params/blocks.0.qkv.weight#2"' in text
    assert text.count('"params/blocks.0.qkv.weight#') == 2 * 4  # cut over both axes: 4 ranks write 3 blocks


def generated(strategy):
    train_step = fa.train_step(loss_fn, model=fa.distribute(GPT, strategy), optimizer=fa.sgd(RATE))
    state = train_step.init(seed=3)

    def sample(model):
        tokens = torch.zeros(1, 1, dtype=torch.long)
        while tokens.shape[1] < LENGTH:
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens.tolist()

    def widths(model):
        return {name: list(param.shape) for name, param in model.named_parameters()}

    return train_step.look(state, sample), train_step.look(state, widths, whole=True)


def test_looking_at_a_model(pools):
    """A forward in `look` is that of one process, and `whole=True` shows whole parameters."""
    expected = pools.run(1, generated, "local")[0]
    assert pools.run(2, generated, one(2)) == [expected] * 2
    assert pools.run(4, generated, fa.fsdp(2) * one(2)) == [expected] * 4
    assert expected[1]["head.weight"] == [VOCABULARY, 16]


def test_dimensions_are_those_of_the_layer_s_own_weight(pools):
    """transformers' Conv1D has its input features first, and an embedding its rows."""
    from fnaccel.strategies.tensor.record import _styles_of
    from fnaccel.strategies.tensor.styles import Layer

    class Conv1D(nn.Module):
        pass

    layers = {"linear": nn.Linear(2, 2), "conv": Conv1D(), "embedding": nn.Embedding(2, 2)}
    styles = {
        name: [_styles_of(Layer(name, layer), dim)[0] for dim in (0, 1)] for name, layer in layers.items()
    }
    assert styles == {
        "linear": ["colwise", "rowwise"],
        "conv": ["rowwise", "colwise"],
        "embedding": ["vocab", "colwise"],
    }
    strategy = one(2, DIMS)
    assert fa.strategy(str(strategy)) == strategy
