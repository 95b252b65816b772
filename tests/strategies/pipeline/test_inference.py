"""`fa.big.pipeline`: chunks of rows run on the stages of a model, and outputs are those of one process."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import fnaccel as fa
from fnaccel.testing import assert_close
from tests.strategies.pipeline import models
from tests.strategies.pipeline import test_generate as texts
from tests.strategies.pipeline import test_transformers as zoo

Error = fa.errors.CapabilityError


def built(model, n=-1, **options):
    torch.manual_seed(1)
    return fa.big.pipeline(model().eval(), n, **options)


def whole(model):
    torch.manual_seed(1)
    return model().eval()


def tokens(rows):
    return torch.randint(models.VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(rows))


def called(model, options, rows):
    staged = built(model, **options)
    return [staged(tokens(each)) for each in rows]


@pytest.mark.parametrize(
    ("ranks", "chunks"), [(2, 4), (2, 1), (2, None), (4, 3)], ids=lambda value: str(value)
)
def test_outputs_are_those_of_one_process_in_the_order_of_the_rows(pools, ranks, chunks):
    rows = [8, 7, 3, 1, 8]
    with torch.no_grad():
        expected = [whole(models.deep_gpt)(tokens(each)) for each in rows]
    for found in pools.run(ranks, called, models.deep_gpt, {"chunks": chunks}, rows):
        for output, wanted in zip(found, expected, strict=True):
            assert_close(output, wanted)
            assert not output.requires_grad


def test_only_the_last_stage_gets_outputs_if_asked(pools):
    first, last = pools.run(2, called, models.TiedGPT, {"chunks": 3, "outputs": "last"}, [7, 1])
    assert first == [None, None]
    for output, rows in zip(last, [7, 1], strict=True):
        assert_close(output, whole(models.TiedGPT)(tokens(rows)).detach())


def named(model, names):
    staged = built(model, split=SPLITS.get(model.__name__, "even"), chunks=3)
    batch = batch_of(model)
    output = staged(**{name: batch[name] for name in names})
    return {key: value for key, value in output.items() if isinstance(value, torch.Tensor)}


def batch_of(model):
    batch = zoo.rows_of(0, 0, model is zoo.vit)
    return batch | {"decoder_input_ids": batch.get("input_ids"), "position_ids": torch.arange(8)[None]}


SPLITS = {"t5": ("decoder.block.0",)}
TEXT = ("input_ids", "attention_mask")
RECORDS = [
    (zoo.bert, TEXT),
    (zoo.gpt2, (*TEXT, "position_ids")),
    (zoo.llama, TEXT),
    (zoo.t5, (*TEXT, "decoder_input_ids")),
    (zoo.vit, ("pixel_values",)),
]


@pytest.mark.parametrize(("model", "names"), RECORDS, ids=[model.__name__ for model, _ in RECORDS])
def test_records_of_transformers_come_whole(pools, model, names):
    batch = batch_of(model)
    with torch.no_grad():
        expected = whole(model)(**{name: batch[name] for name in names})
    for found in pools.run(2, named, model, names):
        assert found.keys() == {key for key, value in expected.items() if isinstance(value, torch.Tensor)}
        for key, value in found.items():
            assert_close(value, expected[key])


def generated(way, options):
    return texts.generate(built(texts.gpt2, **options), way)


@pytest.mark.parametrize("way", ["greedy", "sampled", "beams"])
def test_a_model_on_stages_generates(pools, way):
    expected = texts.generate(whole(texts.gpt2), way)
    for options in ({}, {"outputs": "last"}):
        for found in pools.run(2, generated, way, options):
            assert torch.equal(found, expected)


def by_hand(given):
    """A loop with a cache: its rows run as one chunk. Then what all chunks made, which can't be used."""
    model = built(texts.llama, chunks=3)
    rows = texts.prompts()
    cache = transformers.DynamicCache(config=model.config)
    output = model(**rows, past_key_values=cache)
    following = output.logits[:, -1:].argmax(-1)
    mask = torch.cat([rows["attention_mask"], torch.ones(3, 1, dtype=torch.int64)], 1)
    if not given:
        output = model(**rows)
    return model(following, past_key_values=output.past_key_values, attention_mask=mask).logits


def test_a_loop_by_hand_gives_a_cache_and_one_of_several_chunks_raises(pools):
    expected = texts.generate(whole(texts.llama), "greedy")
    for logits in pools.run(2, by_hand, True):
        assert torch.equal(logits[:, -1].argmax(-1), expected[:, 10])
    with pytest.raises(Error, match="each stage made a cache"):
        pools.run(2, by_hand, False)


def held(path):
    """The parameters that a rank has in memory, of a model that was read from a file of all."""
    with fa.big.empty():
        model = models.TiedGPT()
    fa.big.load(model, path)
    model = fa.big.pipeline(model.eval(), chunks=2)
    return {name for name, value in model.named_parameters() if value.numel()}, model(tokens(4))


def test_a_rank_keeps_its_own_layers_of_a_checkpoint(pools, tmp_path):
    model = whole(models.TiedGPT)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    (first, output), (last, same) = pools.run(2, held, str(tmp_path / "model.pt"))
    assert first | last == {*dict(model.named_parameters()), "head.weight"}  # each end has the tied weight
    assert first & last == set()
    assert_close(output, model(tokens(4)).detach())
    assert torch.equal(output, same)


def copies():
    """Two copies of two stages, each with rows of its own."""
    world = fa.world.world.current()
    rows = 5 + world.rank % 2
    return rows, built(models.deep_gpt, 2, chunks=2)(tokens(rows))


def test_copies_of_a_pipeline_have_rows_of_their_own(pools):
    for rows, output in pools.run(4, copies):
        assert_close(output, whole(models.deep_gpt)(tokens(rows)).detach())


def alone():
    model = built(models.deep_gpt, 1, chunks=4)
    return model(tokens(3)), model(tokens(3)).requires_grad


def test_one_process_runs_the_model_as_it_is(pools):
    ((output, takes_gradient),) = pools.run(1, alone)
    assert_close(output, whole(models.deep_gpt)(tokens(3)).detach())
    assert not takes_gradient


# -- mistakes -----------------------------------------------------------------------------------------------


def with_labels():
    return built(zoo.bert, chunks=2)(**zoo.rows_of(0, 0, False))


def other_rows():
    return built(models.deep_gpt)(tokens(4 + fa.world.world.current().rank))


def a_block():
    model = built(models.deep_gpt)
    return model.blocks[0](torch.zeros(2, 3, models.WIDTH))


def a_shard():
    model = models.deep_gpt()
    torch.distributed.fsdp.fully_shard(model)
    return fa.big.pipeline(model)


WRONG = [
    (with_labels, Error, r"the output 'loss' has not one row .*leave the argument out"),
    (other_rows, fa.errors.ArgumentError, r"rank 0 of pp was called with .*\[4, 8\].*and rank 1 with .*\[5, 8\]"),
    (a_block, Error, "blocks.0 was called outside of the model's forward"),
    (a_shard, Error, "distributed already"),
    (lambda: fa.big.pipeline(built(models.deep_gpt)), Error, "the model is distributed already"),
    (lambda: built(models.deep_gpt, split=("blocks.1", "blocks.2")), fa.errors.ArgumentError, "2 paths for 2 stages"),
    (lambda: built(lambda: nn.Sequential(nn.Linear(2, 2))), Error, "1 block, for 2 stages"),
    (lambda: built(zoo.t5), Error, r"split=\('decoder.block.0',\)"),
    (lambda: built(models.deep_gpt, 3), fa.errors.AxisProductError, r"fa.big.pipeline\(n=3\)"),
    (lambda: built(lambda: nn.DataParallel(models.deep_gpt())), Error, "distributed already, as a torch.nn.parallel"),
    (lambda: fa.big.pipeline(nn.Linear(2, 2, device="meta")), fa.errors.ArgumentError, "weight has no values"),
    (lambda: built(models.deep_gpt, chunks=0), fa.errors.ArgumentError, "chunks=0"),
    (lambda: built(models.deep_gpt, outputs="first"), fa.errors.ArgumentError, "outputs='first'"),
]  # fmt: skip


def wrong(place):
    return WRONG[place][0]()


@pytest.mark.parametrize("place", range(len(WRONG)))
def test_a_mistake_raises_by_name(pools, place):
    _, kind, text = WRONG[place]
    with pytest.raises(kind, match=f"(?s){text}"):
        pools.run(2, wrong, place)


def goes_on():
    model = built(zoo.bert, chunks=2)
    with pytest.raises(Error, match="leave the argument out"):
        model(**zoo.rows_of(0, 0, False))
    rows = {name: value for name, value in zoo.rows_of(0, 0, False).items() if name != "labels"}
    return model(**rows).logits


def test_after_an_output_that_can_not_be_joined_a_model_runs(pools):
    first, second = pools.run(2, goes_on)
    assert torch.equal(first, second)
    assert first.isfinite().all()


def a_token_that_is_none(chunks):
    model, rows = built(models.deep_gpt, chunks=chunks), tokens(4)
    if fa.world.world.current().rank == 1:
        rows[3, 1] = 10**6
    model(rows)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_rank_that_waits_learns_of_an_error(pools, chunks):
    text = r"rank 1, which raised IndexError in it(?s:.*)model\(...\) of fa.big.pipeline"
    with pytest.raises(fa.errors.PeerLostError, match=text):
        pools.run(2, a_token_that_is_none, chunks)


def test_without_a_world_it_raises():
    with pytest.raises(fa.errors.NoWorldError):
        fa.big.pipeline(models.deep_gpt())
