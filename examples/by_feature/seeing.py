"""See a run: where its time and memory go, how fast it is, and a page about it at its end.

    python examples/by_feature/seeing.py
    fnaccel launch -n 2 --strategy ddp examples/by_feature/seeing.py
    fnaccel trace summarize runs/seeing/trace

Each rank writes a trace of three steps, whose phases have names. Rank 0 writes the report.
"""

from __future__ import annotations

from pathlib import Path

from digits import build_model, loaders, loss_fn, parser

import fnaccel as fa


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--dir", default="runs/seeing", help="the traces and the report go here")
    args = arguments.parse_args()
    folder = Path(args.dir)
    train_loader, _ = loaders()
    # a loss far above the usual one changes nothing
    transforms = fa.chain(fa.transforms.on_spike(do="skip"), fa.clip_norm(1.0))
    with fa.start() as world:
        train_step = fa.train_step(
            transforms(loss_fn), model=fa.distribute(build_model), optimizer=fa.adamw(3e-3)
        )
        state = train_step.init(seed=0)
        watch = fa.Watch(
            profile=fa.profile(folder / "trace", wait=2, warmup=1, active=3),
            throughput=fa.seeing.Throughput(peak=0.05),  # TFLOP/s, of a slow CPU
            memory=True,
        )
        for state, metrics in fa.scan(
            train_step, state, fa.shard(train_loader), epochs=args.epochs, watch=watch,
            track=fa.Tracking(report=folder / "report.html", config=vars(args)),
        ):  # fmt: skip
            pass
        world.print(
            f"{metrics['rows_per_second']:.0f} rows a second, {metrics['data_wait']:.0%} waiting for data"
        )
        world.print(f"{metrics['mfu']:.1%} of the peak, {metrics['peak_mib']:.0f} MiB")
        world.print(f"report: {folder / 'report.html'}")


if __name__ == "__main__":
    main()
