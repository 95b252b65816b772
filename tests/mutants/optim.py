"""Deliberate bugs of optimizers from parts. Each would train otherwise without an error."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PARTS = "tests/optim/test_parts.py"
RULES = "optim/rules.py"
CHAIN = "optim/chain_kernel.py"
OPERATIONS = "optim/operations.py"

MUTANTS = [
    Mutant(
        "parameters stay rounded after a look where an optimizer evaluates", "program/parameter_averages.py",
        "_torch.foreach_copy_(list(self._parameters), self._kept)", "pass",
        ("tests/optim/test_evaluation_point.py", "-k", "evaluate_look_and_export and adamw and local"),
    ),
    Mutant(
        "a look stays where an optimizer trains", "program/model_access.py",
        "point = None if train else self._owner.evaluation_point()", "point = None",
        ("tests/optim/test_evaluation_point.py", "-k", "evaluate_look_and_export and sgd and local"),
    ),
    Mutant(
        "slots at an unknown point are adopted", "interchange/adopting.py",
        "lease_of(like, _WHERE).owner.instance.updater.switching:", "False:",
        ("tests/optim/test_evaluation_point.py", "-k", "file_of_torch and train"),
    ),
    Mutant(
        "an adapter stays where an optimizer trains", "interchange/adapter.py",
        "with values_of(state, style):", "if True:",
        ("tests/interchange/test_adapter.py", "-k", "as_its_optimizer_evaluates"),
    ),
    Mutant(
        "an export stays where an optimizer trains", "interchange/exporting.py",
        "point = lease_of(source, _WHERE).owner.evaluation_point()", "point = None",
        ("tests/optim/test_evaluation_point.py", "-k", "evaluate_look_and_export and adamw and fsdp"),
    ),
    Mutant(
        "parameters without a gradient in some updates are not named", "program/update.py",
        "warns=owner.mesh.world.rank == 0", "warns=False",
        ("tests/optim/test_absent_gradients.py", "-k", "counts_otherwise and adamw and local"),
    ),
    Mutant(
        "a captured step drops gradients that come late", "program/step_graph.py",
        "            _torch.end_trace(LATE)\n", "            pass\n",
        ("tests/optim/test_absent_gradients.py", "-k", "used_later and sgd"),
    ),
    Mutant(
        "a rule that differs from its kernel", RULES, "ops.div(mean, _unbiased(beta1, info.updates))", "ops.div(mean, 1.0)",
        (PARTS, "-k", "the_rule_is and adamw"),
    ),
    Mutant(
        "a left out update moves the slots of parts", CHAIN, "            if bool(skip):\n                return\n", "",
        (PARTS, "-k", "a_skipped_update and eager"),
    ),
    Mutant(
        "a left out update moves the slots of parts in a graph", RULES,
        "value = value if skip is None else", "value = value if True else",
        (PARTS, "-k", "a_skipped_update and captured"),
    ),
    Mutant(
        "a part reads a list that was written to", "optim/parts.py", 'mixed = ops.sign_(ops.lerp(slots["exp_avg"]',
        'mixed = ops.sign_(ops.lerp_(slots["exp_avg"]', (PARTS, "-k", "in_place_is and lion"),
    ),
    Mutant(
        "a part hands its slot on", RULES, "else ops.copy_(grads, buffer)", "else buffer",
        (PARTS, "-k", "in_place_is and trace"),
    ),
    Mutant(
        "numbers in a graph keep their first slots", RULES, "if target.ndim == 0 and torch", "if False and torch",
        (PARTS, "-k", "odd_shapes and True and Scalars"),
    ),
    Mutant(
        "norms by shard", OPERATIONS, "        squares = _torch.summed_over(squares, self.over.group)\n", "",
        (PARTS, "-k", "one_process and fsdp and 2-None"),
    ),
    Mutant(
        "rows by shard", OPERATIONS, "        if not cut or self.over is None", "        if True or self.over is None",
        (PARTS, "-k", "one_process and fsdp and 2-None"),
    ),
    Mutant(
        "copies of a part count twice in its norm", OPERATIONS, "        if any(copies > 1 for copies in self.copies):", "        if False:",
        (PARTS, "-k", "one_process and tensor"),
    ),
    Mutant(
        "slow weights begin before weights were adopted", "optim/parts.py", "info.updates == 1, params)", "False, params)",
        (PARTS, "-k", "adopted"),
    ),
    Mutant(
        "numbers of groups begin again after a restore", "optim/foreign.py", "            number.put()\n", "            pass\n",
        ("tests/optim/test_numbers_of_groups.py", "-k", "restored and local"),
    ),
    Mutant(
        "numbers of groups are not adopted", "interchange/sources/torch_files.py", "slots[key] = {**slots.get(key, {}), **numbers}",
        "pass", ("tests/optim/test_numbers_of_groups.py", "-k", "adopted"),
    ),
    Mutant(
        "new slots count the updates of the run", "checkpoint/restoring.py", "            self.refuse_late(like, stored)\n", "",
        ("tests/checkpoint/test_new_slots.py", "-k", "refused_or_count and local"),
    ),
    Mutant(
        "a late start counts the updates of the run", "engine/updater.py", "number - part.starts if part.starts else number", "number",
        ("tests/checkpoint/test_new_slots.py", "-k", "refused_or_count and local"),
    ),
    Mutant(
        "caches have to fit", "checkpoint/restoring.py", "elif name not in caches or", "elif True or",
        ("tests/checkpoint/test_grown_buffers.py", "-k", "is_resumed and local and grows"),
    ),
    Mutant(
        "a restart skips again", "checkpoint/resuming.py", "                return read()\n", "                return read(skip=skip)\n",
        ("tests/checkpoint/test_grown_buffers.py", "-k", "skip_and_rename"),
    ),
    Mutant(
        "extras of rank 0 are kept for all", "checkpoint/saving.py", "    _compare_extras(states, world, where)\n", "",
        ("tests/checkpoint/test_extras_of_ranks.py", "-k", "of_each_rank and tensor"),
    ),
    Mutant(
        "extras of new shapes are not compared", "checkpoint/saving.py", "    if kinds in compared:\n", "    if compared:\n",
        ("tests/checkpoint/test_extras_of_ranks.py", "-k", "differ_later"),
    ),
    Mutant(
        "a whole part gets shards", RULES, "    if not part.whole:\n        return _checked(", "    if True:\n        return _checked(",
        ("tests/optim/test_whole_parts.py", "-k", "equals_the_loop and fsdp and False-False"),
    ),
    Mutant(
        "a whole part begins with slots of shards", RULES, "whole = [ops.gathered(place, value)]", "whole = [value]",
        ("tests/optim/test_whole_parts.py", "-k", "equals_the_loop and fsdp and False-False"),
    ),
    Mutant(
        "a part may write to parameters", RULES, "if before is not None and before !=", "if False and before !=",
        ("tests/optim/test_whole_parts.py", "-k", "wrong_results"),
    ),
    Mutant(
        "a masked decay decays all", "optim/fused.py", "0.0 if mask is not None else decay", "decay", (PARTS, "-k", "a_mask_of_the_decay"),
    ),
    Mutant(
        "a chain's slots take each other's names", RULES, "    while shown in taken:\n", "    while False:\n",
        (PARTS, "-k", "names_of_their_own"),
    ),
]  # fmt: skip
