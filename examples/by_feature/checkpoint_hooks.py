"""Files of your own in each checkpoint, and folders of each machine.

It takes the place of Accelerate's hooks of `save_state` and `load_state`.

    python examples/by_feature/checkpoint_hooks.py --dir runs/hooks
    fnaccel launch -n 2 --strategy fsdp examples/by_feature/checkpoint_hooks.py --each-machine
"""

from __future__ import annotations

import json
from pathlib import Path

from digits import build_model, loaders, loss_fn, parser

import fnaccel as fa


def main() -> None:
    arguments = parser(__doc__, epochs=1)
    arguments.add_argument("--dir", default="runs/hooks", help="the directory of the checkpoints")
    arguments.add_argument("--each-machine", action="store_true", help="machines do not share the directory")
    args = arguments.parse_args()
    train_loader, _ = loaders()
    with fa.start() as world:
        train_step = fa.train_step(loss_fn, model=fa.distribute(build_model), optimizer=fa.adamw(3e-3))

        def add_labels(directory: Path, _: fa.TrainState) -> None:
            if world.is_main or (args.each_machine and world.is_local_main):
                (directory / "labels.json").write_text(json.dumps([str(digit) for digit in range(10)]))

        def say(path: Path) -> None:
            world.print("saved", path.name)

        with fa.checkpoint.hooks(before_save=add_labels, after_save=say):
            state = fa.resume_or_init(args.dir, train_step, seed=0, each_machine=args.each_machine)
            save = fa.Autosave(args.dir, every=11, each_machine=args.each_machine)
            for state, _ in fa.scan(train_step, state, fa.shard(train_loader), epochs=args.epochs, save=save):
                pass
        newest = fa.checkpoint.latest(args.dir)
        labels = json.loads((newest / "labels.json").read_text())
        world.print(f"{len(labels)} labels beside step {state.step}")
        # for libraries that read no safetensors
        exported = fa.interchange.export_hf(
            Path(args.dir) / "exported", state, safetensors=False, overwrite=True
        )
        world.print("exported", sorted(file.name for file in exported.iterdir()))


if __name__ == "__main__":
    main()
