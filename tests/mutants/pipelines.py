"""Deliberate bugs of pipelines. Each would train wrongly without an error, or hold what it should not."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PARITY = "tests/strategies/pipeline/test_parity.py"
STATE = "tests/strategies/pipeline/test_state.py"
MODELS = "tests/strategies/pipeline/test_transformers.py"
MISTAKES = "tests/strategies/pipeline/test_mistakes.py"
SCHEDULES = "tests/strategies/pipeline/test_schedules.py"
HALVES = "tests/strategies/pipeline/test_halves.py"
MEMORY = "tests/strategies/pipeline/test_memory.py"
INFERENCE = "tests/strategies/pipeline/test_inference.py"
GENERATE = "tests/strategies/pipeline/test_generate.py"
FAULTS = "tests/strategies/pipeline/test_faults.py"
FOLDER = "strategies/pipeline"

MUTANTS = [
    Mutant(
        "pipeline: random numbers after a group begin anew", f"{FOLDER}/passes.py", "(element.path, *inside)",
        "(element.path,)", (MODELS, "-k", "bart"),
    ),
    Mutant(
        "pipeline: a hang without the stage", f"{FOLDER}/executor.py", "forward(i, stage)", "forward(i)",
        (FAULTS, "-k", "silent and 0"),
    ),
    Mutant(
        "pipeline: a profile takes all stages of a rank for one", f"{FOLDER}/executor.py",
        "backward(i, (total, counts), stage)", "backward(i, (total, counts), self._own[0])",
        ("tests/strategies/pipeline/test_features.py", "-k", "profile"),
    ),
    Mutant(
        "pipeline: an embedding weighs as if it multiplied", f"{FOLDER}/split.py", 'if asked == "size" and name in looked_up:', "if False:",
        ("tests/strategies/pipeline/test_features.py", "-k", "large_head"),
    ),
    Mutant(
        "pipeline: a tied head weighs nothing", f"{FOLDER}/split.py", "named_parameters(remove_duplicate=False):\n        if asked", "named_parameters():\n        if asked",
        ("tests/strategies/pipeline/test_features.py", "-k", "large_head"),
    ),
    Mutant(
        "pipeline: ranks run schedules of their own", f"{FOLDER}/schedules.py", "if table != tables[0]:", "if len(table) != len(tables[0]):",
        (MISTAKES, "-k", "differs_between_ranks and 2"),
    ),
    Mutant(
        "pipeline: a stage that waits is blamed for a hang", "world/stalls.py", " and not record.does.startswith(WAITS)", "",
        ("tests/launch/test_watchdog_verdicts.py", "-k", "keeps_the_others"),
    ),
    Mutant(
        "pipeline: a stage waits for ever after a message", f"{FOLDER}/executor.py",
        '        note(f"runs stage {stage}")\n        if torch', "        if torch", (FAULTS, "-k", "silent and 2"),
    ),
    Mutant(
        "pipeline: gradients of weights are left out for a micro-batch", f"{FOLDER}/executor.py",
        "        if opened.rest is not None:\n            opened.rest()\n",
        "        if opened.rest is not None and len(self._open) != 1:\n            opened.rest()\n",
        (PARITY, "-k", "gpt and zero and computes"),
    ),
    Mutant(
        "pipeline: a weight apart from the inputs gets no gradient", f"{FOLDER}/halves.py",
        "    if apart:", "    if not apart:", (HALVES, "-k", "aside"),
    ),
    Mutant(
        "pipeline: a gradient is the tensor of a message", f"{FOLDER}/halves.py", "grad.clone() if", "grad if",
        (HALVES, "-k", "skips"),
    ),
    Mutant(
        "pipeline: a look at values of another stage", f"{FOLDER}/executor.py",
        "                check_known(result)\n", "", (MISTAKES, "-k", "look"),
    ),
    Mutant(
        "pipeline: a copy of values of another stage", f"{FOLDER}/unknown.py",
        "            out += tree.leaves(args[0])\n", "            pass\n", (MISTAKES, "-k", "built_first and copy"),
    ),
    Mutant(
        "pipeline: a choice or a metric of another stage", "engine/totals.py",
        "            refuse()\n", "            pass\n", (MISTAKES, "-k", "built_first and (metric or choice)"),
    ),
    Mutant(
        "pipeline: backwards in another order", f"{FOLDER}/schedules.py",
        '[("B", rank, i) for i in range(micro_batches)],', '[("B", rank, i) for i in reversed(range(micro_batches))],',
        (SCHEDULES, "-k", "1f1b_and_gpipe"),
    ),
    Mutant(
        "pipeline: a tied gradient is lost", f"{FOLDER}/shared.py", "grad += other", "pass",
        (PARITY, "-k", "tied and four"),
    ),
    Mutant(
        "pipeline: a tied gradient counts twice", f"{FOLDER}/shared.py", "grad += other", "grad += 2 * other",
        (PARITY, "-k", "tied and four"),
    ),
    Mutant(
        "pipeline: a tied value stays behind", f"{FOLDER}/shared.py", "value.copy_(got)", "pass",
        (PARITY, "-k", "tied and four"),
    ),
    Mutant(
        "pipeline: a weight of the batch is summed over stages", "engine/totals.py",
        "self.weight = self.weight / self._stages", "pass", ("tests/strategies/pipeline/test_features.py", "-k", "weight_of_the_batch"),
    ),
    Mutant(
        "pipeline: random numbers of a stage begin anew", f"{FOLDER}/passes.py", "now.streams.put_back()", "pass",
        (PARITY, "-k", "dropout and two and computes and not rank"),
    ),
    Mutant(
        "pipeline: the norm of one stage", "world/mesh.py", 'MODEL_AXES = ("pp", *SHARD_AXES, "tp")',
        'MODEL_AXES = (*SHARD_AXES, "tp")', (PARITY, "-k", "gpt and four and computes"),
    ),
    Mutant(
        "pipeline: the class of ddp", f"{FOLDER}/building.py",
        "engine_without(axis, inner) if shards else _replicas(inner)", "engine_without(axis, inner)",
        (PARITY, "-k", "product and ddp and not tensor"),
    ),
    Mutant(
        "pipeline: outputs that hooks hear on one stage", f"{FOLDER}/passes.py",
        "_call_again(element.module.get_submodule(inner), value)", "pass", (MODELS, "-k", "mixtral and gpipe"),
    ),
    Mutant(
        "pipeline: values stored on modules of one stage", f"{FOLDER}/passes.py",
        "setattr(element.module.get_submodule(inner), attribute, stored)", "pass",
        (PARITY, "-k", "beside and four"),
    ),
    Mutant(
        "pipeline: buffers of one stage", f"{FOLDER}/building.py", "        buffers.share()\n", "",
        (PARITY, "-k", "moving and four"),
    ),
    Mutant(
        "pipeline: a later stage moves the buffers of an earlier one", f"{FOLDER}/passes.py",
        "own if home == stage else own.clone()", "own", (PARITY, "-k", "moving and rank"),
    ),
    Mutant(
        "pipeline: replicas keep their own gradients", f"{FOLDER}/building.py",
        "hooks=Hooks(finish=averager(params, mesh))", "hooks=Hooks()", (PARITY, "-k", "product and ddp and not tensor"),
    ),
    Mutant(
        "pipeline: parameters of other stages are read as nothing", f"{FOLDER}/passes.py",
        "                held[attribute] = value\n            yield\n", "            yield\n",
        (MISTAKES, "-k", "first_step and parameter"),
    ),
    Mutant(
        "pipeline: initial values of another seed", f"{FOLDER}/drawing.py",
        "return param if id(made[next(numbers)]) in wanted else mode.in_pages(param)",
        "return param if id(made[next(numbers)]) in wanted else mode.in_pages(param).to('meta')",
        (PARITY, "-k", "gpt and four and computes"),
    ),
    Mutant(
        "pipeline: the whole model while it is built", f"{FOLDER}/building.py",
        "    if has_factories(spec.model):\n", "    if False:\n", (MEMORY, "-k", "momentum"),
    ),
    Mutant(
        "pipeline: a stage writes another's values", f"{FOLDER}/owned.py", "dist.broadcast(whole, group=group, group_src=self.rank)",
        "dist.broadcast(whole, group=group, group_src=0)", (STATE, "-k", "holds_its_own"),
    ),
    Mutant(
        "pipeline: the length of a cache on one stage", f"{FOLDER}/caches.py", "self.cache.update(nothing, nothing, place)",
        "pass", (GENERATE, "-k", "gpt2-greedy"),
    ),
    Mutant(
        "pipeline: the cache of the last stage on all", f"{FOLDER}/messages.py", "return -1 if obj is self._own",
        "return None if obj is self._own", (GENERATE, "-k", "holds_the_keys"),
    ),
    Mutant(
        "pipeline: a rank's second stage sees the keys of its first one", f"{FOLDER}/caches.py",
        "            self.cache.layers = list(self._before)\n", "            self._before = self.cache.layers\n",
        (GENERATE, "-k", "llama-beams and interleaved"),
    ),
    Mutant(
        "pipeline: samples after masks of one stage", f"{FOLDER}/executor.py", "self._staged.draw_on(drawn)", "pass",
        (GENERATE, "-k", "last_stage_has_drawn"),
    ),
    Mutant(
        "pipeline: chunks are joined in another order", f"{FOLDER}/inference.py", "return torch.cat(leaves)",
        "return torch.cat(leaves[::-1])", (INFERENCE, "-k", "order_of_the_rows"),
    ),
    Mutant(
        "pipeline: an average over chunks is that of the first", f"{FOLDER}/inference.py",
        "        raise CapabilityError(\n            f\"the output", "        return leaves[0]\n        raise CapabilityError(\n            f\"the output",
        (INFERENCE, "-k", "mistake"),
    ),
]  # fmt: skip
