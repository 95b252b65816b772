"""What a train step costs on one GPU, beside Accelerate with torch.compile.

    OMP_NUM_THREADS=1 python benchmarks/gpu.py [--quick]

It needs a CUDA device. Contestants run in one process, in turns; they must reach the same losses first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import one_process
import torch
from environment import present
from interleave import race_steps
from models import gpt_of_its_own, tokens
from options import Options, begin
from report import Row, compare, publish

import fnaccel as fa

PEER = "Accelerate + torch.compile(model)"
ON_GPU = "compiled step, small GPT, one GPU (CUDA graphs)"
Loops = dict[str, Iterator[torch.Tensor]]


def gpu_rows(options: Options) -> list[Row]:
    """CUDA graphs on one GPU."""
    device, backend = options.pick(("cuda", "inductor"), ("cuda", "inductor"), ("cpu", "eager"))
    data, graphs = tokens(), options.pick("reduce-overhead", "reduce-overhead", None)

    def accelerate(*, mode: str | None = None, fused: bool = False) -> Iterator[torch.Tensor]:
        return one_process.with_accelerate(
            gpt_of_its_own(), data, fused=fused, batch=8, mode=mode, cpu=device == "cpu",
            dynamo_backend=backend,
        )  # fmt: skip

    with fa.start(device=device):
        loops: Loops = {
            "fnaccel": one_process.ours(
                gpt_of_its_own(), data, batch=8, scope="step", mode=graphs, backend=backend
            ),
            PEER: accelerate(),
            f"{PEER}, fused AdamW": accelerate(fused=True),
            f"{PEER}, fused AdamW, CUDA graphs": accelerate(fused=True, mode=graphs),
            "fnaccel, eager": one_process.ours(gpt_of_its_own(), data, batch=8),
        }
        samples = race_steps(
            present(loops), check=5, blocks=options.pick(31, 5, 1), calls=options.pick(20, 20, 2)
        )
    return compare(ON_GPU, samples, {PEER: 0.5}, "ms")


def main() -> None:
    """Run the race."""
    options = begin("gpu", __doc__, (), ("Accelerate",))
    if options.level != "smoke" and not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs a CUDA device")
    publish(options, gpu_rows(options))


if __name__ == "__main__":
    main()
