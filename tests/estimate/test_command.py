"""`fnaccel estimate`: what it prints, its JSON, its mistakes."""

from __future__ import annotations

import json

import pytest
import transformers

import fnaccel as fa
from fnaccel import errors
from fnaccel.cli.main import main
from fnaccel.cli.options.estimate import parser
from tests.estimate.models import GPT, loss_fn, tokens_of

OWN = (
    "tests.estimate.models:GPT",
    "--loss",
    "tests.estimate.models:loss_fn",
    "--inputs",
    f"{__name__}:rows_of",
)


def rows_of(rows):
    return tokens_of("meta", rows=rows)


@pytest.fixture
def folder(tmp_path):
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=300, hidden_size=64, intermediate_size=160,
        num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    ).save_pretrained(tmp_path)  # fmt: skip
    return str(tmp_path)


def estimate(capsys, *arguments, code=0):
    assert main(["estimate", *map(str, arguments)]) == code
    return capsys.readouterr().out


@pytest.mark.long
def test_what_it_prints(capsys, folder):
    text = estimate(capsys, folder, "-n", 4, "--strategy", "fsdp", "--precision", "bf16", "--batch", 2)
    assert "dtype  largest layer" in text
    assert "\nfp32 " in text
    assert "\nint4 " in text
    assert "fsdp(): 4 ranks, dp_shard=4\n  peak " in text
    assert "    gathered parameters" in text
    assert "shard        11 all_gather, " in text


def test_it_is_what_the_function_says(capsys):
    found = json.loads(
        estimate(capsys, *OWN, "-n", 2, "--strategy", "ddp", "--remat", "--batch", 3, "--json")
    )
    expected = fa.estimate.training(
        fa.remat(loss_fn),
        model=fa.distribute(GPT, "ddp"),
        optimizer=fa.adamw(1e-3),
        batch=rows_of(3),
        ranks=2,
    )
    assert found["training"]["total"] == expected.total
    assert found["training"]["kinds"] == dict(expected.peak.kinds)
    assert found["training"]["collectives"][0]["kind"] == "all_reduce"
    assert found["sizes"][0]["dtype"] == "fp32"


@pytest.mark.long
def test_a_recipe_and_options_over_it(capsys, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("strategy: fsdp\nprecision: bf16\nremat: true\n")
    small = json.loads(estimate(capsys, *OWN, "-n", 2, "--config", file, "--json"))["training"]
    whole = json.loads(estimate(capsys, *OWN, "-n", 2, "--config", file, "--strategy", "ddp", "--json"))[
        "training"
    ]
    assert small["layout"].startswith("fsdp()")
    assert whole["layout"].startswith("ddp()")
    assert small["total"] < whole["total"]


@pytest.mark.long
def test_what_fits(capsys):
    sizes = {}
    for text in ("1GiB", "12MB", "1MB"):
        code = 1 if text == "1MB" else 0
        found = json.loads(estimate(capsys, *OWN, "-n", 4, "--batch", 8, "--fits", text, "--json", code=code))
        sizes[text] = found["cheapest"]
    assert sizes["1GiB"]["strategy"] == "ddp"
    assert not sizes["1GiB"]["remat"]
    assert sizes["12MB"]["strategy"] == "zero2"
    assert sizes["12MB"]["remat"]
    assert sizes["1MB"] is None
    text = estimate(capsys, *OWN, "-n", 4, "--batch", 8, "--fits", "1GiB")
    assert "yes, the cheapest" in text
    assert text.rstrip().endswith('suggested: --strategy "ddp"')
    assert "none fits" in estimate(capsys, *OWN, "--fits", "1MB", code=1)


def test_inference(capsys, folder):
    text = estimate(capsys, folder, "--inference", "--batch", 2, "--length", 100)
    assert "inference of 2 rows of 100 tokens: " in text
    found = json.loads(estimate(capsys, folder, "--inference", "--batch", 2, "--length", 100, "--json"))
    assert found["inference"]["cache"] == 2 * 5 * 2 * 16 * 100 * 2 * 2


@pytest.mark.long
def test_the_least_time(capsys, folder):
    rates = ("--flops", "1T", "--link", "10GB/s", "--network", "1GB")
    text = estimate(capsys, folder, "-n", 8, "--per-machine", 4, "--strategy", "fsdp", *rates)
    assert "at least " in text
    assert "network " in text
    found = json.loads(estimate(capsys, folder, "-n", 8, "--strategy", "fsdp", *rates, "--json"))[
        "least_time"
    ]
    assert found["total"] == max(found["compute"], *found["links"].values())
    assert list(found["links"]) == ["link"]


def test_a_factory_without_a_loss(capsys):
    assert "to estimate training, give --loss and --inputs" in estimate(capsys, "tests.estimate.models:GPT")


MISTAKES = [
    (("--batch", "0"), "--batch 0 is too few"),
    (("-n", "8", "--per-machine", "3"), "8 ranks do not make machines of 3"),
    (("--inference", "--fits", "1GiB"), "--fits compares strategies of training"),
    (("--link", "1GB"), "a bound of the time needs the rate of compute too"),
    (("--fits", "many"), "'many' is no number of bytes"),
    (("--flops", "fast"), "'fast' is no rate"),
    (("--strategy", "deepspeed(stage=2)", "-n", "2"), "lays the model out itself"),
    (("--strategy", "fsdp * context(2)", "-n", "2"), "ranks of context share a row"),
]


@pytest.mark.parametrize(("options", "text"), MISTAKES, ids=str)
def test_mistakes(capsys, options, text):
    assert main(["estimate", *OWN, *options]) == 2
    found = capsys.readouterr().err
    assert text in found
    assert "  where: " in found
    assert "  fix: " in found


def test_options_without_a_value_for_a_model():
    with pytest.raises(errors.ArgumentError):
        parser().parse_args([])
