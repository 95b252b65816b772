"""Log metrics while training. It takes the place of Accelerate's by_feature/tracking.py.

    python examples/by_feature/tracking.py --log runs/digits.jsonl
    python examples/by_feature/tracking.py --trackers tensorboard wandb

A tracker is any object with the methods `start`, `log` and `finish`. Only rank 0 calls them.
`--trackers` takes names, or `all` for those installed.
"""

from __future__ import annotations

from digits import build_model, loaders, loss_fn, metrics_fn, parser

import fnaccel as fa
from fnaccel.track import JsonlTracker, read_jsonl

logger = fa.seeing.get_logger("digits", level="info")


class LargestGradient:
    """A tracker of your own: remember the step with the largest norm of the gradient."""

    def start(self, config):  # noqa: ARG002 - shown by trackers that keep it
        self.step, self.norm = 0, 0.0

    def log(self, step, metrics):
        if metrics["grad_norm"] > self.norm:
            self.step, self.norm = step, metrics["grad_norm"]

    def finish(self):
        print(f"largest gradient: norm {self.norm:.2f} at step {self.step}")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--log", default="runs/digits.jsonl", help="the file for JSON lines")
    arguments.add_argument("--trackers", nargs="*", default=[], help="such as tensorboard wandb, or all")
    args = arguments.parse_args()
    step = fa.clip_norm(loss_fn, 1.0)  # it reports metrics["grad_norm"]
    trackers = [JsonlTracker(args.log), LargestGradient(), *args.trackers]
    train_loader, test_loader = loaders()
    with fa.start() as world:
        train_step = fa.train_step(step, model=fa.distribute(build_model), optimizer=fa.adamw(3e-3))
        state = train_step.init(seed=0)
        track = fa.Tracking(*trackers, every=5, config=vars(args))
        for state, _ in fa.scan(train_step, state, fa.shard(train_loader), epochs=args.epochs, track=track):
            pass
        logger.info("%d updates on this rank", state.step, in_order=True)
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        world.print(f"accuracy {float(scores['accuracy']):.4f}")
        if world.is_main:
            rows = [record for record in read_jsonl(args.log) if "step" in record]
            print(f"{len(rows)} rows in {args.log}, the last of step {rows[-1]['step']}")


if __name__ == "__main__":
    main()
