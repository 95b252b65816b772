"""Train with a DeepSpeed configuration file. It takes the place of Accelerate's
by_feature/deepspeed_with_config_support.py.

    fnaccel launch -n 2 examples/by_feature/deepspeed_with_config_file.py
    fnaccel launch -n 2 examples/by_feature/deepspeed_with_config_file.py --config your_file.json

The file names stage, accumulation, clipping, optimizer and scheduler. Each "auto" is filled from the script.
`pip install -e ".[deepspeed]"` installs DeepSpeed, which compiles an extension at the first start.
"""

from __future__ import annotations

import json
from pathlib import Path

from digits import build_model, loaders, loss_fn, metrics_fn, parser

import fnaccel as fa

CONFIG = Path(__file__).parent / "zero2.json"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--config", default=str(CONFIG), help="a DeepSpeed JSON file")
    args = arguments.parse_args()
    config = json.loads(Path(args.config).read_text())
    train_loader, test_loader = loaders()
    rate = 3e-3
    if "scheduler" in config:
        total = args.epochs * len(train_loader)
        rate = fa.optim.deepspeed_lr(rate, warmup=total // 10, total=total)
    optimizer = fa.optim.from_deepspeed(rate) if "optimizer" in config else fa.adamw(rate)
    with fa.start() as world:
        model = fa.distribute(build_model, fa.deepspeed(config=args.config))
        train_step = fa.train_step(loss_fn, model=model, optimizer=optimizer)
        world.print(train_step.plan)
        state = train_step.init(seed=0)
        for state, metrics in fa.scan(train_step, state, fa.shard(train_loader), epochs=args.epochs):
            pass
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        world.print(f"loss {float(metrics['loss']):.4f}, accuracy {float(scores['accuracy']):.4f}")


if __name__ == "__main__":
    main()
