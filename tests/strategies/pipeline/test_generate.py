"""`generate` on stages: each rank has keys of its own layers, and all ranks get the tokens of one process."""

from __future__ import annotations

import pytest
import torch
import transformers

import fnaccel as fa
from tests.strategies.pipeline import test_transformers as zoo

VOCABULARY, TOKENS, LAYERS = 61, 64, 4
SMALL = zoo.SMALL | {
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 96, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip


def gpt2():
    config = transformers.GPT2Config(
        n_embd=16, n_layer=LAYERS, n_head=4, vocab_size=VOCABULARY, n_positions=96, initializer_range=0.3,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def qwen3():
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SMALL, head_dim=4, tie_word_embeddings=True)
    )


def mistral():
    """Its window is shorter than what it generates."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=24))


def mixed():
    """Full attention in the first layers, a window in the last ones."""
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
    config = transformers.Qwen3Config(
        **SMALL, head_dim=4, use_sliding_window=True, sliding_window=24, layer_types=kinds
    )
    return transformers.Qwen3ForCausalLM(config)


def prompts():
    """Rows of three lengths, padded on the left."""
    ids = torch.randint(2, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row, length in enumerate((9, 6, 4)):
        mask[row, : 9 - length] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
}


def generate(model, way, rows=None):
    torch.manual_seed(5)
    rows = prompts() if rows is None else rows
    model.eval()
    return model.generate(**rows, max_new_tokens=TOKENS, **WAYS[way])


def looked(model, strategy, fn, *args):
    train_step = fa.train_step(zoo.loss_fn, model=fa.distribute(model, strategy), optimizer=fa.sgd(0.1))
    return train_step.look(train_step.init(seed=0), fn, *args)


INTERLEAVED = "pipeline(2, schedule='interleaved', virtual=2)"
ALONE = (
    "pipeline(4, split={'model.embed_tokens': 0, 'model.layers.0': 1, 'model.layers.3': 2, 'model.norm': 3})"
)
ROWS = [
    *((model, way, 2, "pipeline(2)") for model in (gpt2, llama, qwen3, mistral, mixed) for way in ("greedy", "sampled", "beams")),
    (llama, "greedy", 4, "pipeline(4)"),
    (mixed, "beams", 4, "pipeline(4)"),
    (mistral, "sampled", 2, INTERLEAVED),
    (llama, "beams", 2, INTERLEAVED),
    (mixed, "greedy", 2, "pipeline(2, schedule='zero_bubble', virtual=2)"),
    (llama, "greedy", 4, ALONE),
    (qwen3, "greedy", 4, "pipeline(2) * tensor(2)"),
    (llama, "sampled", 4, "pipeline(2) * fsdp(2)"),
]  # fmt: skip


@pytest.mark.long_except("^(gpt2|mistral)-(greedy|beams)-2|^llama-sampled-2|interleaved")
@pytest.mark.parametrize(
    ("model", "way", "ranks", "strategy"),
    ROWS,
    ids=[f"{model.__name__}-{way}-{ranks}-{text}" for model, way, ranks, text in ROWS],
)
def test_stages_generate_the_tokens_of_one_process(pools, model, way, ranks, strategy):
    (expected,) = pools.run(1, looked, model, "local", generate, way)
    assert expected.shape[1] == 9 + TOKENS
    assert len(expected.unique()) > 10
    for tokens in pools.run(ranks, looked, model, strategy, generate, way):
        assert torch.equal(tokens, expected)


def test_tokens_are_looked_up_in_the_prompt(pools):
    rows = {"input_ids": prompts()["input_ids"][:1]}
    (expected,) = pools.run(1, looked, llama, "local", generate, "lookup", rows)
    for tokens in pools.run(2, looked, llama, "pipeline(2)", generate, "lookup", rows):
        assert torch.equal(tokens, expected)


def sampled_with_dropout(model):
    """Masks of dropout, then a sample: both come from one stream."""
    model.train()
    torch.manual_seed(5)
    drawn = []
    for _ in range(3):
        logits = model(**prompts(), use_cache=False).logits[:, -1]
        drawn.append(torch.multinomial(logits.softmax(-1), 1))
    return torch.cat(drawn, 1)


def test_samples_go_on_where_the_last_stage_has_drawn(pools):
    (expected,) = pools.run(1, looked, gpt2, "local", sampled_with_dropout)
    for drawn in pools.run(2, looked, gpt2, "pipeline(2)", sampled_with_dropout):
        assert torch.equal(drawn, expected)


def token_by_token(model, given):
    """A loop by hand, with a cache that the model made or the caller gave. Says what the rank has kept."""
    model.eval()
    ids = prompts()["input_ids"]
    output = model(ids, past_key_values=transformers.DynamicCache() if given else None)
    found = [output.logits[:, -1]]
    for _ in range(5):
        following = found[-1].argmax(-1, keepdim=True)
        output = model(following, past_key_values=output.past_key_values)
        found.append(output.logits[:, -1])
    cache = output.past_key_values
    return torch.stack(found), cache.get_seq_length(), [layer.keys.shape for layer in cache.layers]


@pytest.mark.parametrize("given", [False, True])
def test_a_cache_holds_the_keys_of_one_stage_and_has_the_length_of_all(pools, given):
    ((expected, length, _),) = pools.run(1, looked, llama, "local", token_by_token, given)
    own, nothing = (3, 2, 14, 4), (3, 1, 14, 1)
    ranks = pools.run(2, looked, llama, "pipeline(2)", token_by_token, given)
    for rank, (found, same, shapes) in enumerate(ranks):
        assert torch.equal(found, expected)
        assert same == length == 14
        layers = [own, own, nothing, nothing] if rank == 0 else [nothing, nothing, own, own]
        assert list(map(tuple, shapes)) == layers[: len(shapes)]


def headers_sent(model, rounds):
    """The messages that began with a header, of each rank, while prompts of other lengths are continued."""
    from fnaccel.strategies.pipeline import messages

    counted, dumped = [], messages._dumped
    messages._dumped = lambda *args: counted.append(1) or dumped(*args)
    try:
        for length in range(1, rounds + 1):
            model.generate(torch.full((1, length), 7), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    finally:
        messages._dumped = dumped
    return len(counted)


def test_a_header_is_sent_for_each_length_of_a_prompt_and_none_for_its_tokens(pools):
    assert pools.run(2, looked, llama, "pipeline(2)", headers_sent, 5) == [5, 5]


def forgotten(model, most):
    """Lengths that were run before are run again after their headers were forgotten."""
    from fnaccel.strategies.pipeline import messages

    kept, messages._MOST_HEADERS = messages._MOST_HEADERS, most
    try:
        lengths = [1, 2, 3, 4, 1, 2, 3, 4]
        return [model(torch.full((1, length), 7)).logits[0, -1] for length in lengths]
    finally:
        messages._MOST_HEADERS = kept


def test_headers_are_forgotten_when_there_are_many(pools):
    (expected,) = pools.run(1, looked, llama, "local", forgotten, 3)
    for found in pools.run(2, looked, llama, "pipeline(2)", forgotten, 3):
        assert torch.equal(torch.stack(found), torch.stack(expected))


def lora():
    return zoo.peft.get_peft_model(
        llama(), zoo.peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    )


def test_a_model_with_adapters_generates(pools):
    (expected,) = pools.run(1, looked, lora, "local", generate, "greedy")
    for tokens in pools.run(2, looked, lora, "pipeline(2)", generate, "greedy"):
        assert torch.equal(tokens, expected)


def static(model):
    return model.generate(**prompts(), max_new_tokens=4, cache_implementation="static")


def static_by_hand(model):
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    return model(**prompts(), past_key_values=cache)


def offloaded(model):
    cache = transformers.DynamicCache(config=model.config)
    cache.offloading = True
    return model(**prompts(), past_key_values=cache)


def tuples(model):
    return model(**prompts(), past_key_values=((torch.zeros(3, 2, 1, 4),) * 2,) * LAYERS)


def states_of_a_recurrence(model):
    cache = transformers.DynamicCache(config=model.config)
    cache.layers[0] = transformers.cache_utils.LinearAttentionLayer()
    return model(**prompts(), past_key_values=cache)


def both_caches(model):
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    ids = prompts()["input_ids"] % zoo.VOCABULARY
    rows = {"input_ids": ids, "decoder_input_ids": ids}
    return model(**rows, past_key_values=transformers.EncoderDecoderCache(*caches))


def beneath(model):
    """A cache that the model made where nobody saw it."""
    output = model.model(**prompts())
    assert tuple(output.last_hidden_state.shape) == (3, 9, 16)
    return output.past_key_values.get_seq_length()


WRONG = [
    (llama, static, "a cache of class StaticCache,"),
    (llama, static_by_hand, "a cache of class StaticCache,"),
    (llama, offloaded, "a cache of class DynamicCache,"),
    (llama, tuples, "a cache of class tuple,"),
    (llama, states_of_a_recurrence, "a cache of class DynamicCache,"),
    (zoo.t5, both_caches, "a cache of class EncoderDecoderCache,"),
    (llama, beneath, "each stage made a cache"),
]


@pytest.mark.parametrize(("model", "fn", "text"), WRONG, ids=[fn.__name__ for _, fn, _ in WRONG])
def test_other_caches_raise_and_name_the_way_out(pools, model, fn, text):
    strategy = "pipeline(2, split=('decoder.block.0',))" if model is zoo.t5 else "pipeline(2)"
    with pytest.raises(fa.errors.CapabilityError, match=text) as caught:
        pools.run(2, looked, model, strategy, fn)
    assert "DynamicCache(config=model.config)" in str(caught.value)
    assert "use_cache=False" in str(caught.value)


def test_t5_says_that_its_encoder_was_called_alone(pools):
    rows = {"input_ids": prompts()["input_ids"] % zoo.VOCABULARY}
    with pytest.raises(fa.errors.CapabilityError, match=r"encoder\.block\.0 was called outside"):
        pools.run(2, looked, zoo.t5, "pipeline(2, split=('decoder.block.0',))", generate, "greedy", rows)


def attentions(model):
    """What blocks return beside the activation gets longer at each token."""
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": 4, "output_attentions": True, "return_dict_in_generate": True}
    return model.generate(**prompts(), do_sample=False, **options).attentions


def test_attentions_of_all_stages_come_along(pools):
    (expected,) = pools.run(1, looked, llama, "local", attentions)
    for found in pools.run(2, looked, llama, "pipeline(2)", attentions):
        assert [[each.shape for each in token] for token in found] == [
            [each.shape for each in token] for token in expected
        ]
        assert torch.equal(found[3][0], expected[3][0])
        assert torch.equal(found[3][3], expected[3][3])
