"""Deliberate bugs of axes whose ranks share rows, or have parts of the model or of the loss.

Each would train wrongly without an error.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PARTS = "tests/extend/test_parts.py"
SAME_ROWS = "tests/extend/test_same_rows.py"
WHOLE_MODEL = "tests/extend/test_whole_model.py"

MUTANTS = [
    Mutant(
        "totals of the batch axis alone", "program/instance.py", 'world.device, mesh.group("totals")', 'world.device, mesh.group("batch")',
        (PARTS, "-k", "one_loss and -2-nothing"),
    ),
    Mutant(
        "captured totals of the batch axis alone", "program/step_graph.py",
        'self._group = engine.layout.mesh.group("loss")', 'self._group = engine.layout.mesh.group("batch")',
        (PARTS, "-k", "one_loss and -2-compiled"),
    ),
    Mutant(
        "weights known ahead are those of one rank", "engine/totals.py",
        "dist.all_reduce(total, group=group)", "pass", (PARTS, "-k", "one_loss and -2-weigh"),
    ),
    Mutant(
        "a norm that counts copies of a parameter", "engine/gradients.py", "self._square(grads) / copies if copies > 1 else", "",
        (WHOLE_MODEL, "-k", "patterns and fsdp and False"),
    ),
    Mutant(
        "parts of a sequence draw the same numbers", "program/instance.py", "self.rank = mesh.loss_rank", "self.rank = mesh.batch_rank",
        (PARTS, "-k", "draw_other"),
    ),
    Mutant(
        "a loop by hand splits rows over all ranks", "data/shard.py", "            _check_all_differ(world)\n", "",
        ("tests/extend/test_extension.py", "-k", "by_hand"),
    ),
    Mutant(
        "ranks that share rows are not compared", "engine/same_rows.py", "if len(versions) > 1:", "if False:",
        (SAME_ROWS, "-k", "by_hand"),
    ),
    Mutant(
        "rows are compared in the first epoch alone", "engine/same_rows.py", "if self._compared == epoch:", "if self._compared >= 0:",
        (SAME_ROWS, "-k", "each_epoch"),
    ),
    Mutant(
        "ddp averages over the batch axis alone", "strategies/ddp.py",
        'process_group=mesh.group("gradient")', 'process_group=mesh.group("batch")', (PARTS, "-k", "one_loss and ddp and 4-nothing"),
    ),
    Mutant(
        "norms of parts", "engine/engine.py", 'return self.mesh["model"] if', "return None if",
        ("tests/parity/test_matrix.py", "-k", "clip"),
    ),
    Mutant(
        "recorded values of one rank", "step/step.py", "else tree.map(tree.whole, value)", "else value",
        ("tests/transforms/test_own_values.py", "-k", "recorded and 2-fsdp and eager"),
    ),
    Mutant(
        "gradients divided by the parts of the rows", "engine/passes.py", "ranks = engine.layout.mesh.gradient_size",
        "ranks = engine.layout.mesh.batch_size",
        (PARTS, "-k", "one_loss and fsdp and 4-nothing"),
    ),
    Mutant(
        "units of a part of the model", "program/axes_applied.py", '_named(hook, module, f"transform {name}")', "hook",
        (WHOLE_MODEL, "-k", "remat and size"),
    ),
    Mutant(
        "a parameter that an axis made is not frozen", "program/axes_applied.py",
        "param.requires_grad_(trained.get(name, param.requires_grad))", "pass", (WHOLE_MODEL, "-k", "patterns and ddp"),
    ),
    Mutant(
        "all gathers of a forward are moved", "strategies/fsdp_regather.py", " and _taken_by(node) in units", "",
        ("tests/parity/test_regather.py", "-k", "activations"),
    ),
    Mutant(
        "a save between two averages", "checkpoint/saving.py", "if same_at != state.step and (", "if False and (",
        ("tests/extend/test_axis_with_a_state.py", "-k", "between_two_averages and save"),
    ),
    Mutant(
        "moments of one rank in the place of all", "checkpoint/saving.py", "sums[name] != found[0][name]",
        "False", ("tests/extend/test_axis_with_a_state.py", "-k", "forgets_to_average"),
    ),
    Mutant(
        "a transform's state of one rank in the place of all", "checkpoint/saving.py", "if whole or state.transforms:",
        "if whole:", ("tests/checkpoint/test_faults.py", "-k", "state_of_a_transform and ddp"),
    ),
    Mutant(
        "a loop that saves what ranks don't share", "loop/autosave.py", "waits = not self.work.is_whole(state) and (due", "waits = False and (due",
        ("tests/extend/test_axis_with_a_state.py", "-k", "waits_for_the_next"),
    ),
    Mutant(
        "kept gradients are written again", "engine/gradients.py", "data_ptr() in held else leaf", "data_ptr() not in held else leaf",
        ("tests/transforms/test_kept_tensors.py", "-k", "kept_gradients and ddp"),
    ),
    Mutant(
        "a slot of one rank's part is saved", "engine/updater.py", "if leaf.sharded and optimizer.elementwise]:", "if False]:",
        ("tests/transforms/test_kept_tensors.py", "-k", "slot"),
    ),
    Mutant(
        "ranks that train apart are scored as one", "loop/evaluating.py",
        "if same_at != state.step and (ema or layout.read_between is None):", "if False:",
        ("tests/extend/test_axis_with_a_state.py", "-k", "nothing_is_saved and evaluate"),
    ),
    Mutant(
        "an axis that counts steps from 0", "program/instance.py", "step=step + 1,\n                params=shown.params",
        "step=step,\n                params=shown.params", ("tests/extend/test_axis_with_a_state.py", "-k", "one_model_a_rank"),
    ),
]  # fmt: skip
