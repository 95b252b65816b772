"""A script of fnaccel as a Ray Train job: Ray starts a worker for each rank and begins the process group.

    python ray_job.py 16 train.py --steps 1000
    ray job submit --working-dir . -- python ray_job.py 16 train.py --steps 1000

Copy it beside the script, and edit what Ray is given. `fa.start` uses the process group that it finds.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

VARIABLES = {"FNACCEL_SET": os.environ.get("FNACCEL_SET", "strategy=ddp")}
STORAGE = os.environ.get("RAY_STORAGE", "/tmp/ray_results")
GPUS = torch.cuda.is_available()


def train(program: list[str]) -> None:
    """Run the script on a worker, as one rank."""
    os.environ.update(VARIABLES)
    sys.argv = list(program)
    sys.path.insert(0, str(Path(program[0]).resolve().parent))
    runpy.run_path(program[0], run_name="__main__")


def main() -> None:
    """Start the workers, and wait for their end."""
    workers, *program = sys.argv[1:]
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # workers stay where the script lies
    ray.init()
    trainer = TorchTrainer(
        lambda: train(program),
        torch_config=TorchConfig(backend="nccl" if GPUS else "gloo"),
        scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=GPUS),
        run_config=RunConfig(storage_path=STORAGE, failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
