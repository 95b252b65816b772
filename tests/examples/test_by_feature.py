"""The examples of one feature each, as a user starts them."""

from __future__ import annotations

import re

import pytest
import torch

from fnaccel.seeing import summarize
from tests.examples.running import run

pytestmark = [pytest.mark.launcher, pytest.mark.long]


def output(name, *args, ranks=2, strategy="ddp"):
    """The output of an example, alone (`ranks=None`) or by the launcher under a strategy (None: its own)."""
    launch = ("--strategy", strategy) if ranks and strategy else ()
    return run(f"by_feature/{name}", *args, ranks=ranks, launch=launch).out


def number(pattern, text):
    """The last number that stands in the place of the brackets."""
    return float(re.findall(pattern, text)[-1])


def test_tracking(tmp_path):
    log = tmp_path / "digits.jsonl"
    ended = run(
        "by_feature/tracking", "--log", str(log), "--epochs", "2", ranks=2, launch=("--strategy", "fsdp")
    )
    text = ended.out
    assert re.findall(r"INFO digits: (.*)", ended.err) == [
        f"[rank {rank}] 44 updates on this rank" for rank in (0, 1)
    ]
    assert f"8 rows in {log}, the last of step 40" in text  # 44 steps, one row for each 5
    assert text.count("largest gradient: norm") == 1
    assert number(r"accuracy ([\d.]+)", text) > 0.6


def test_seeing_writes_traces_and_a_report(tmp_path):
    text = output("seeing", "--dir", str(tmp_path), "--epochs", "2")
    assert number(r"(\d+) rows a second", text) > 0
    assert f"report: {tmp_path / 'report.html'}" in text
    ranks = summarize(tmp_path / "trace")
    assert [(rank.rank, rank.steps) for rank in ranks] == [(0, 3), (1, 3)]
    assert all({"data", "forward", "backward", "gradients", "update"} <= set(rank.phases) for rank in ranks)
    page = (tmp_path / "report.html").read_text()
    for title in ("Loss", "Rows a second", "Model FLOPs utilisation", "Peak memory of each phase, MiB"):
        assert title in page


def test_checkpointing_goes_on_in_the_middle_of_an_epoch_on_other_ranks(tmp_path):
    directory = str(tmp_path / "run")
    common = ("--dir", directory, "--epochs", "2", "--save-every", "10")
    first = output("checkpointing", *common, "--stop-at", "35", ranks=None)
    assert "begins at step 0" in first
    assert "ends at step 35" in first
    assert "checkpoints: [30, 35]" in first
    best = number(r"best accuracy ([\d.]+)", first)
    second = output("checkpointing", *common, strategy="fsdp")
    assert f"begins at step 35, Position(epoch=1, samples=832), best {best:.4f}" in second
    assert "ends at step 44" in second
    assert number(r"best accuracy ([\d.]+)", second) > max(best, 0.6)


def test_early_stopping_goes_back_to_the_best_state():
    text = output("early_stopping", "--patience", "1", "--epochs", "25", strategy="ddp")
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", text)]
    stopped, best = re.search(r"stopped after epoch (\d+), back to epoch (\d+)", text).groups()
    assert losses[-1] > losses[-2]
    assert (int(stopped), int(best)) == (len(losses), losses.index(min(losses)) + 1)


def test_cross_validation_averages_the_folds():
    text = output("cross_validation", "--folds", "2", "--epochs", "4")
    assert len(re.findall(r"fold \d: accuracy", text)) == 2
    assert number(r"average of 2 models: accuracy ([\d.]+)", text) > 0.6


def test_multi_process_metrics_are_those_of_one_process():
    texts = [output("multi_process_metrics", "--epochs", "3", ranks=ranks) for ranks in (None, 3)]
    scores = [number(r"macro F1 ([\d.]+) on 397 rows", text) for text in texts]
    assert scores[0] > 0.8
    assert scores[1] == pytest.approx(scores[0], abs=0.01)
    assert all("a loop by hand gathers the same rows: True" in text for text in texts)


def test_memory_raises_the_number_of_micro_batches_and_keeps_the_update():
    flags = ("--epochs", "1", "--pretend-limit")
    whole = output("memory", *flags, "1000", ranks=None)
    split = output("memory", *flags, "20", strategy="fsdp")
    assert "128 rows fit: 1 micro-batches in an update of 128 rows" in whole
    assert "16 rows fit: 4 micro-batches in an update of 128 rows" in split
    losses = [number(r"loss ([\d.]+)", text) for text in (whole, split)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


@pytest.mark.parametrize("outer", [None, "sgd(0.7, momentum=0.5, nesterov=True)"])
def test_replicas_that_average_are_evaluated_and_go_on_from_a_checkpoint(tmp_path, outer):
    flags = ("--dir", str(tmp_path / "run"), *(() if outer is None else ("--outer", outer)))
    first = output("local_sgd", *flags, "--epochs", "3", strategy=None)
    assert re.findall(r"step (\d+):", first) == ["16", "32", "48", "64"]
    again = output("local_sgd", *flags, "--epochs", "6", strategy=None)
    assert re.findall(r"step (\d+):", again) == ["80", "96", "112", "128"]
    assert number(r"accuracy ([\d.]+)", again) > 0.8


def test_schedule_free_is_above_90_percent_on_shards():
    text = output("schedule_free", "--epochs", "5", strategy="fsdp")
    assert number(r"accuracy ([\d.]+)", text) > 0.9


HOOKS = [
    ("powersgd(start_powerSGD_iter=5)", ()), ("'bf16'", ("--hook", "bf16")),
    ("rounded", ("--hook", "own")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("hook", "flags"), HOOKS, ids=["by the launcher", "by a flag of the script", "of ones own"]
)
def test_ddp_comm_hook(hook, flags):
    text = output("ddp_comm_hook", *flags, "--epochs", "3", strategy=None if flags else f"ddp(hook={hook})")
    assert f"on ddp(hook={hook})" in text
    assert number(r"accuracy ([\d.]+)", text) > 0.6


def test_fsdp_holds_half_of_the_parameters_and_moments():
    text = output("fsdp_with_peak_memory", "--epochs", "1", strategy="fsdp")
    held = {}
    for name in ("parameters", "moments", "peak"):
        ranks = re.search(rf"epoch 1: {name} in MiB by rank: \[([\d.]+), ([\d.]+)\]", text)
        held[name] = [float(size) for size in ranks.groups()]
    assert held["parameters"] == pytest.approx([3.05, 3.05], abs=0.1)  # of 6.1 MiB
    assert held["moments"] == pytest.approx([6.1, 6.1], abs=0.1)
    assert min(held["peak"]) > 100


def test_deepspeed_with_a_config_file():
    text = output("deepspeed_with_config_file", "--epochs", "4", strategy=None)
    assert "BACKWARD accumulate      n=2" in text
    assert "clip_norm       max_norm=1.0  [by deepspeed]" in text
    assert number(r"accuracy ([\d.]+)", text) > 0.7


def test_distributed_inference_keeps_the_order_of_the_prompts():
    one, two = (
        output("distributed_inference", "--length", "4", ranks=ranks, strategy=None) for ranks in (None, 2)
    )
    texts = [re.findall(r"^('.*') -> ('.*')$", text, re.MULTILINE) for text in (one, two)]
    assert len(texts[0]) == 5
    assert texts[0] == texts[1]
    assert "prompts by rank: [3, 2]" in two


@pytest.mark.parametrize("model", ["bert", "gpt2", "llama", "t5"])
def test_pipeline_inference_is_that_of_one_process(model):
    one, two = (
        output("pipeline_inference", "--model", model, ranks=ranks, strategy=None) for ranks in (None, 2)
    )
    assert number(r"mean (\S+)", two) == pytest.approx(number(r"mean (\S+)", one), abs=2e-6)
    tokens = [re.findall(r"tokens (.*)", text) for text in (one, two)]
    assert tokens[0] == tokens[1]
    assert bool(tokens[0]) == (model in ("gpt2", "llama"))
    whole, *parts = (
        int(n) for text in (one, two) for n in re.findall(r"\d+", text.split("rank: ")[1].split("]")[0])
    )
    assert all(part < 0.7 * whole for part in parts)


@pytest.mark.parametrize("ranks", [None, 2])
def test_process_control(tmp_path, ranks):
    text = output(
        "process_control", "--weights", str(tmp_path / "new" / "digits.pt"), "--epochs", "1", ranks=ranks
    )
    assert "22 batches in an epoch" in text
    assert "8 tensors in" in text
    assert f"says rank {0 if ranks is None else 1}" in text
    if ranks == 2:
        assert text.index("[rank 0] 704 rows, and not the last rank") < text.index(
            "[rank 1] 696 rows, and the last"
        )
    assert len(torch.load(tmp_path / "new" / "digits.pt")) == 8


@pytest.mark.parametrize("ranks", [None, 2])
def test_optimizer_groups(ranks):
    text = output("optimizer_groups", "--epochs", "4", ranks=ranks, strategy="fsdp")
    assert "epoch 1: {'lr/Muon': '0.0200', 'lr/adamw.0': '0.0000'" in text
    assert "epoch 2: {'lr/Muon': '0.0200', 'lr/adamw.0': '0.0010'" in text
    assert number(r"accuracy ([\d.]+)", text) > 0.9


def test_growing_batches_go_on_after_a_limit_of_time(tmp_path):
    directory = ("--dir", str(tmp_path / "run"))
    output("growing_batches", *directory, "--max-seconds", "0.0001", ranks=None)
    text = output("growing_batches", *directory, "--epochs", "4")
    assert "step 40: 64 rows" in text
    assert "step 60: 128 rows" in text
    assert number(r"accuracy ([\d.]+)", text) > 0.8


@pytest.mark.parametrize("flags", [(), ("--each-machine",)])
def test_checkpoint_hooks(tmp_path, flags):
    text = output("checkpoint_hooks", "--dir", str(tmp_path / "run"), *flags, strategy="fsdp")
    assert "saved step-0000000022" in text
    assert "10 labels beside step 22" in text
    assert "exported ['pytorch_model.bin']" in text


def test_ragged_rows_have_one_curve():
    alone, both = (output("ragged_rows", "--epochs", "3", ranks=ranks) for ranks in (None, 2))
    losses = [number(r"epoch 3: loss ([\d.]+)", text) for text in (alone, both)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert losses[0] < 1.5


def test_a_big_model_generates_the_tokens_of_the_model_in_memory():
    text = output("big_model", "--budget", "5MB", ranks=None)
    assert "the tokens of the model in memory: True" in text
    fetched, ahead = re.search(r"(\d+) layers fetched, (\d+) of them ahead", text).groups()
    assert int(ahead) > int(fetched) // 2


def test_quantize_lora_goes_on_where_it_stopped(tmp_path):
    flags = ("--dir", str(tmp_path), "--base-steps", "10", "--save-every", "5")
    first = output("quantize_lora", *flags, "--steps", "10")
    assert "begins at step 0" in first
    second = output("quantize_lora", *flags, "--steps", "20", ranks=None)
    assert "begins at step 10" in second
    assert "adapter: ['adapter_config.json', 'adapter_model.safetensors']" in second


def test_mixture_is_the_same_on_two_ranks():
    alone, two = output("mixture", ranks=None), output("mixture", strategy="fsdp")
    assert alone == two
    assert "(32 rows), prose" in alone
    assert number(r"code ([\d.]+) ", alone) < 2.8
