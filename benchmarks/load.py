"""Loading a sharded checkpoint into a model without values: fnaccel and Accelerate.

    OMP_NUM_THREADS=1 python benchmarks/load.py [--quick]

A Llama of random weights in shards of safetensors and of `torch.save`, to the CPU, with the dtype of the
files and with another one. Each loads in processes of its own, which take turns: seconds of the load alone
and with a first forward pass, and the largest memory during the load, less that from before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from environment import present
from interleave import Samples, turns
from offload import config
from options import Options, begin
from report import Row, compare, publish

GOAL, MEMORY = 0.8, 1.0
TOKENS = torch.arange(8)[None]


def ours(settings: Any) -> tuple[Any, Callable[..., Any]]:
    import fnaccel as fa

    def load(model: Any, folder: Path, dtype: Any) -> Any:
        fa.big.load(model, folder, {"": "cpu"}, dtype=dtype)
        return model

    with fa.big.empty():
        return transformers.LlamaForCausalLM(settings).eval(), load


def peer(settings: Any) -> tuple[Any, Callable[..., Any]]:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    def load(model: Any, folder: Path, dtype: Any) -> Any:
        return load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"}, dtype=dtype)

    with init_empty_weights():
        return transformers.LlamaForCausalLM(settings).eval(), load


def memory(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(f"{name}:")) * 1024


def child(name: str, folder: Path, dtype: str, layers: int, width: int) -> None:
    """Load once in this process, and print what it took."""
    torch.set_num_threads(1)
    kind = None if dtype == "stored" else getattr(torch, dtype)
    model, call = {"fnaccel": ours, "Accelerate": peer}[name](config(layers, width))
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on: an exec keeps that of its parent
    before, began = memory("VmRSS"), time.perf_counter()
    model = call(model, folder, kind)
    seconds, peak = time.perf_counter() - began, memory("VmHWM") - before
    began = time.perf_counter()
    with torch.inference_mode():
        logits = model(TOKENS).logits
    first = time.perf_counter() - began
    print(
        json.dumps(
            {
                "load": seconds,
                "both": seconds + first,
                "peak": peak,
                "sum": float(logits.double().abs().sum()),
            }
        )
    )


def measure(folder: Path, dtype: str, layers: int, width: int, rounds: int) -> dict[str, Samples]:
    """Each figure of each round, by contestant. They take turns."""
    taken: dict[str, list[dict[str, float]]] = present({"fnaccel": [], "Accelerate": []})
    for _, name in turns(list(taken), rounds, warmup=0):
        words = [sys.executable, __file__, "--child", name, str(folder), dtype, str(layers), str(width)]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        taken[name].append(json.loads(done.stdout.splitlines()[-1]))
    sums = {round(run["sum"], 1) for runs in taken.values() for run in runs}
    if max(sums) - min(sums) > 1e-3 * max(sums):
        raise SystemExit(f"the logits differ: {sums}")
    return {
        key: {name: [run[key] for run in runs] for name, runs in taken.items()}
        for key in ("load", "both", "peak")
    }


def rows_of(root: Path, form: str, dtype: str, options: Options) -> list[Row]:
    """Time and memory of one format of the files and one dtype of the model."""
    layers, width = shape(options)
    samples = measure(root / form, dtype, layers, width, options.pick(7, 2, 1))
    size = sum(file.stat().st_size for file in (root / form).iterdir()) / 1e6
    what = f"{size:,.0f} MB of {form} to the CPU, {dtype}"
    mebibytes = {name: [peak / 2**20 for peak in peaks] for name, peaks in samples["peak"].items()}
    return [
        *compare(f"load {what}", samples["load"], {"Accelerate": GOAL}, unit="ms"),
        *compare(f"load and first forward, {what}", samples["both"], unit="ms"),
        *compare(f"peak memory, {what}", mebibytes, {"Accelerate": MEMORY}, unit="MiB"),
    ]


def shape(options: Options) -> tuple[int, int]:
    """Layers and width of the model."""
    return options.pick((12, 1024), (4, 512), (2, 64))


def main() -> None:
    """Run everything, or load once in a process of its own."""
    if sys.argv[1:2] == ["--child"]:
        name, folder, dtype, layers, width = sys.argv[2:]
        child(name, Path(folder), dtype, int(layers), int(width))
        return
    options = begin("load", str(__doc__), peers=("Accelerate",))
    table: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = transformers.LlamaForCausalLM(config(*shape(options)))
        model.save_pretrained(root / "safetensors", max_shard_size="150MB")
        _save_torch(model, root / "torch")
        del model
        for form in options.pick(("safetensors", "torch"), ("safetensors", "torch"), ("safetensors",)):
            for dtype in options.pick(("stored", "bfloat16"), ("stored", "bfloat16"), ("bfloat16",)):
                table += rows_of(root, form, dtype, options)
    publish(options, table)


def _save_torch(model: Any, folder: Path) -> None:
    """Shards of `torch.save` with the index of Hugging Face."""
    folder.mkdir()
    names = list(model.state_dict())
    files = {name: f"pytorch_model-{1 + 4 * i // len(names):05}-of-00004.bin" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        torch.save(
            {name: model.state_dict()[name].clone() for name in names if files[name] == file}, folder / file
        )
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


if __name__ == "__main__":
    main()
