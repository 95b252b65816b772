"""Forward passes of a model whose weights are on the disk: fnaccel and Accelerate.

    OMP_NUM_THREADS=1 python benchmarks/offload.py [--quick]

A Llama of random weights in safetensors, of 4 and of 12 layers, one token a pass as in generation, and 64.
Both are first checked to give the logits of the model in memory. With a cold page cache, the files of each
are dropped from it before every pass (`posix_fadvise`).
"""

from __future__ import annotations

import gc
import os
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
from interleave import Samples, race, turns
from options import Options, begin
from report import Row, compare, publish

import fnaccel as fa

WARM = 0.6
PLACED = {
    "model.embed_tokens": "disk",
    "model.layers": "disk",
    "model.norm": "cpu",  # Accelerate 1.15 reads no checkpoint for which all is on the disk
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


def config(layers: int, width: int) -> transformers.LlamaConfig:
    """49 MB a layer in fp32 with a width of 1,024."""
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=4096,
        use_cache=False,
        tie_word_embeddings=False,
    )


class Contest:
    """One checkpoint, and both libraries' models that read it from the disk."""

    def __init__(self, root: Path, layers: int, width: int) -> None:
        self.folder, self.copies = root / f"model-{layers}", root / f"copies-{layers}"
        settings = config(layers, width)
        torch.manual_seed(0)
        memory = transformers.LlamaForCausalLM(settings).eval()
        memory.save_pretrained(self.folder, max_shard_size="200MB")
        tokens = torch.arange(64)[None] % settings.vocab_size
        with torch.inference_mode():
            expected = memory(tokens).logits
        del memory
        with fa.big.empty():
            self.ours = transformers.LlamaForCausalLM(settings).eval()
        self.run = fa.big.load(self.ours, self.folder, PLACED)
        ways = present({"fnaccel": lambda _: self.ours, "Accelerate": self._by_accelerate})
        self.models = {name: way(settings) for name, way in ways.items()}
        for name, model in self.models.items():
            with torch.inference_mode():
                if not torch.allclose(model(tokens).logits, expected, atol=1e-4):
                    raise SystemExit(f"the logits of {name} differ from those of the model in memory")

    def _by_accelerate(self, settings: transformers.LlamaConfig) -> Any:
        from accelerate import init_empty_weights, load_checkpoint_and_dispatch

        with init_empty_weights():
            empty: Any = transformers.LlamaForCausalLM(settings).eval()
        return load_checkpoint_and_dispatch(empty, self.folder, device_map=PLACED, offload_folder=self.copies)

    def calls(self, count: int) -> dict[str, Callable[[], Any]]:
        """A forward pass of `count` tokens of each contestant."""
        tokens = torch.arange(count)[None]

        def call(model: Any) -> Callable[[], Any]:
            def forward() -> None:
                with torch.inference_mode():
                    model(tokens)

            return forward

        return {name: call(model) for name, model in self.models.items()}

    def cold(self, blocks: int) -> Samples:
        """Seconds of a pass after the files were dropped from the page cache."""
        calls = self.calls(1)
        taken: Samples = {name: [] for name in calls}
        for _, name in turns(list(calls), blocks, warmup=0):
            self.run.send_home()  # mapped pages can't be dropped
            gc.collect()
            for file in [*self.folder.glob("*.safetensors"), *self.copies.rglob("*")]:
                drop(file)
            began = time.perf_counter()
            calls[name]()
            taken[name].append(time.perf_counter() - began)
        return taken


def drop(file: Path) -> None:
    """Let the page cache forget a file."""
    if file.is_file():
        handle = os.open(file, os.O_RDONLY)
        os.fdatasync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def rows_of(contest: Contest, what: str, options: Options) -> list[Row]:
    """Passes of one model."""
    table: list[Row] = []
    for count in (1, 64):
        samples = race(contest.calls(count), blocks=options.pick(15, 3, 1), calls=2)
        text = f"forward, {count} token{'s' if count > 1 else ''}, warm page cache, {what}"
        table += compare(text, samples, {"Accelerate": WARM}, unit="ms")
    samples = contest.cold(options.pick(7, 3, 1))
    return table + compare(f"forward, 1 token, cold page cache, {what}", samples, unit="ms")


def main() -> None:
    """Run everything."""
    options = begin("offload", str(__doc__), peers=("Accelerate",))
    table: list[Row] = []
    with tempfile.TemporaryDirectory() as root:
        for layers in options.pick((4, 12), (4,), (2,)):
            contest = Contest(Path(root), layers, options.pick(1024, 512, 64))
            size = fa.big.sizes(contest.ours).total / 1e6
            table += rows_of(contest, f"{layers} layers, {size:,.0f} MB on the disk", options)
            del contest
            gc.collect()
    publish(options, table)


if __name__ == "__main__":
    main()
