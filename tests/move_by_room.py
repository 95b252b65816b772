"""Move each test file into the folder of its room, and rewrite what names it. Run once from the root of the checkout.

python tests/move_by_room.py            # moves with git, rewrites imports, pages and deliberate bugs
python tests/move_by_room.py --list     # prints each test function with its old and new place
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDERS = {  # what becomes of whole folders
    "tests/context": "tests/strategies/context",
    "tests/deepspeed": "tests/strategies/deepspeed",
    "tests/xla": "tests/strategies/xla",
    "tests/extension": "tests/extend",
    "tests/functional/programs": "tests/parity/programs",
}
FILES = {
    "tests/strategies.py": "tests/random_inputs.py",
    "tests/models.py": "tests/tiny_models.py",
    "tests/test_batch_size.py": "tests/loop/test_batch_size.py",
    "tests/test_devices.py": "tests/world/test_devices.py",
    "tests/test_faults.py": "tests/world/test_faults.py",
    "tests/test_mesh.py": "tests/world/test_mesh.py",
    "tests/test_notebooks.py": "tests/promises/test_notebooks.py",
    "tests/test_paths.py": "tests/promises/test_paths.py",
    "tests/test_preemption.py": "tests/loop/test_preemption.py",
    "tests/test_program.py": "tests/program/test_program.py",
    "tests/test_random.py": "tests/promises/test_random.py",
    "tests/test_rows.py": "tests/step/test_concat.py",
    "tests/test_running.py": "tests/loop/test_running.py",
    "tests/test_tree.py": "tests/tree/test_tree.py",
    "tests/test_units.py": "tests/models/test_blocks.py",
    "tests/test_world.py": "tests/world/test_world.py",
    "tests/test_world_ranks.py": "tests/world/test_world_ranks.py",
    "tests/axes/models.py": "tests/strategies/tensor/models.py",
    "tests/axes/test_footprint.py": "tests/strategies/test_footprint.py",
    "tests/axes/test_probe.py": "tests/program/test_probe.py",
    "tests/axes/test_tensor.py": "tests/strategies/tensor/test_parity.py",
    "tests/axes/test_tensor_errors.py": "tests/strategies/tensor/test_errors.py",
    "tests/axes/test_tensor_files.py": "tests/strategies/tensor/test_files.py",
    "tests/axes/test_tensor_options.py": "tests/strategies/tensor/test_options.py",
    "tests/axes/test_tensor_state.py": "tests/strategies/tensor/test_state.py",
    "tests/axes/test_tensor_transformers.py": "tests/strategies/tensor/test_transformers.py",
    "tests/engines/runs.py": "tests/strategies/runs.py",
    "tests/engines/test_engines.py": "tests/strategies/test_engines.py",
    "tests/engines/test_offloaded_parts.py": "tests/program/test_offloaded_parts.py",
    "tests/engines/test_order_of_passes.py": "tests/engine/test_order_of_passes.py",
    "tests/engines/test_shaped_aux.py": "tests/engine/test_shaped_aux.py",
    "tests/engines/test_shard_dims.py": "tests/strategies/test_shard_dims.py",
    "tests/engines/test_torch_buckets.py": "tests/strategies/test_torch_buckets.py",
    "tests/functional/losses.py": "tests/parameter_losses.py",
    "tests/functional/test_gradient.py": "tests/program/test_gradient.py",
    "tests/functional/test_params.py": "tests/models/test_parameter_values.py",
    "tests/functional/test_per_example.py": "tests/transforms/test_per_example.py",
    "tests/functional/test_privacy.py": "tests/loop/test_privacy.py",
    "tests/functional/test_programs.py": "tests/parity/test_programs.py",
    "tests/functional/test_pure.py": "tests/program/test_pure.py",
    "tests/functional/test_pure_in_a_graph.py": "tests/program/test_pure_in_a_graph.py",
    "tests/parity/programs/common.py": "tests/parity/programs/raw_loop.py",
    "tests/robust/test_device_maps.py": "tests/models/test_device_maps.py",
    "tests/robust/test_doubled_row.py": "tests/program/test_doubled_row.py",
    "tests/robust/test_draws.py": "tests/engine/test_user_draws.py",
    "tests/robust/test_given_parameters.py": "tests/strategies/test_given_parameters.py",
    "tests/robust/test_held_trees.py": "tests/program/test_held_trees.py",
    "tests/robust/test_hooks.py": "tests/models/test_gradient_hooks.py",
    "tests/robust/test_layout_shown.py": "tests/program/test_layout_shown.py",
    "tests/robust/test_left_loops.py": "tests/loop/test_left_loops.py",
    "tests/robust/test_live_state.py": "tests/program/test_live_state.py",
    "tests/robust/test_losses.py": "tests/step/test_losses.py",
    "tests/robust/test_models.py": "tests/models/test_models.py",
    "tests/robust/test_modes.py": "tests/models/test_modes.py",
    "tests/robust/test_ordinary_use.py": "tests/promises/test_ordinary_use.py",
    "tests/robust/test_plan_texts.py": "tests/program/test_plan_texts.py",
    "tests/robust/test_refused_adopts.py": "tests/program/test_refused_adopts.py",
    "tests/robust/test_scan.py": "tests/loop/test_saves.py",
    "tests/robust/test_skipped_batch.py": "tests/engine/test_skipped_batch.py",
    "tests/robust/test_weights.py": "tests/engine/test_weights.py",
    "tests/transforms/test_loss_info.py": "tests/step/test_loss_info.py",
    "tests/transforms/test_second_gradient.py": "tests/program/test_second_gradient.py",
    "tests/transforms/test_without_step.py": "tests/step/test_without_step.py",
}
EMPTY = ("tests/axes", "tests/engines", "tests/functional", "tests/robust")
ROOMS = (
    "collectives",
    "engine",
    "loop",
    "models",
    "program",
    "step",
    "strategies",
    "strategies/tensor",
    "testing",
    "tree",
    "world",
)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def new_place(path: str) -> str:
    """Where a file goes: first with its folder, then by itself."""
    for old, new in FOLDERS.items():
        if path.startswith(old + "/"):
            path = new + path.removeprefix(old)
    return FILES.get(path, path)


def dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def rewritten(text: str, places: dict[str, str]) -> str:
    """The text with new paths, dotted names and imports of submodules."""
    for old, new in sorted(places.items(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<![\w/]){re.escape(old)}(?!\w)", new, text)
        if old.endswith(".py"):
            text = re.sub(rf"(?<![\w.]){re.escape(dotted(old))}(?![\w.])", dotted(new), text)
            folder, name = dotted(old).rpartition(".")[::2]
            to, called = dotted(new).rpartition(".")[::2]
            if name == called:  # `from tests.engines import runs`
                text = re.sub(
                    rf"from {re.escape(folder)} import {name}\b(?!,)", f"from {to} import {called}", text
                )
    return text


def functions() -> list[tuple[str, str]]:
    """Each test function, with the file that has it."""
    found = []
    for path in git("ls-files", "tests").split():
        if path.endswith(".py"):
            names = re.findall(r"^ *(?:async )?def (test_\w+)\(", Path(path).read_text(), re.MULTILINE)
            found += [(path, name) for name in names]
    return found


def main() -> None:
    listed = git("ls-files", "tests").split()
    places = {path: new_place(path) for path in listed if new_place(path) != path}
    for path, name in functions() if "--list" in sys.argv else []:
        print(f"{path}::{name} -> {new_place(path)}::{name}")
    if "--list" in sys.argv:
        return
    before = [(new_place(path), name) for path, name in functions()]
    for old, new in places.items():
        if (
            Path(old).name == "__init__.py"
            and not Path(old).read_text().strip()
            and old.rpartition("/")[0] not in FOLDERS
        ):
            continue
        Path(new).parent.mkdir(parents=True, exist_ok=True)
        git("mv", old, new)
    for folder in EMPTY:
        if (Path(folder) / "__init__.py").exists():
            git("rm", "-q", f"{folder}/__init__.py")
    for room in ROOMS:
        (Path("tests") / room / "__init__.py").touch()
    git("add", "tests")
    every = {**places, **{f"{old}": new for old, new in FOLDERS.items()}}
    for name in git("ls-files").split():
        path = Path(name)
        if (
            path.suffix in (".py", ".md", ".toml", ".json", ".txt", "")
            and path.is_file()
            and "move" not in name
            and name != "CHANGELOG.md"
        ):
            text = path.read_text()
            changed = rewritten(text, every)
            for old, new in FOLDERS.items():
                changed = re.sub(rf"(?<![\w.]){re.escape(dotted(old))}(?!\w)", dotted(new), changed)
            if changed != text:
                path.write_text(changed)
    lost = sorted(set(before) ^ set(functions()))
    print(f"{len(before)} test functions, {len(places)} files moved, without a new place: {lost}")


if __name__ == "__main__":
    main()
