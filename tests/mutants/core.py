"""Deliberate bugs of the core: steps, engines, strategies, data, checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

COMPILED = "tests/parity/test_compiled.py"
MATRIX = "tests/parity/test_matrix.py"
ENGINES = "tests/strategies/test_engines.py"


MUTANTS = [
    Mutant(
        "a flag of the launcher that says something else is ignored", "program/launcher_flags.py",
        "            _check_same(KINDS[name], chosen, own)\n", "            pass\n",
        ("tests/config/test_launcher_flags.py", "-k", "raises_with_both"),
    ),
    Mutant(
        "a flag of the launcher does not reach a step", "program/launcher_flags.py",
        "            step = transform(step)\n", "            transform(step)\n",
        ("tests/config/test_launcher_flags.py", "-k", "it_trains_as"),
    ),
    Mutant(
        "a chain applies its last transform first", "step/chain.py",
        "for member in self.members:", "for member in reversed(self.members):",
        ("tests/step/test_without_step.py", "-k", "left_to_right"),
    ),
    Mutant(
        "ranks that train on different batches", "engine/same_position.py",
        "self._differ = squares", "self._differ = False and squares",
        ("tests/engine/test_same_position.py", "-k", "raises_on_all and 2-ddp-eager"),
    ),
    Mutant(
        "gathers of later steps are not compared", "engine/same_position.py",
        '(at + zlib.crc32("\\n".join(self._told).encode()))', "at",
        ("tests/launch/test_gather_order.py", "-k", "other_layers"),
    ),
    Mutant(
        "positions whose mean is one of them", "engine/same_position.py",
        "self._differ = squares * self._group.size() != total * total",
        "self._differ = total != self._group.size() * int(self.codes[0])",
        ("tests/engine/test_same_position.py", "-k", "mean_is_one"),
    ),
    Mutant(
        "positions of captured steps not compared", "program/captured_step.py",
        "self._totals.hear(None if step.group is None else out.answers)", "pass",
        ("tests/engine/test_same_position.py", "-k", "raises_on_all and 2-ddp-captured"),
    ),
    Mutant(
        "a rank of fillers whose zeros have no shape", "engine/aux_values.py",
        "torch.zeros(shape) if shape and not isinstance(value, torch.Tensor) else value", "value",
        ("tests/engine/test_shaped_aux.py", "-k", "without_rows"),
    ),
    Mutant(
        "totals of another shape broadcast", "engine/aux_values.py",
        "if shapes != self._shapes[index]:", "if False:",
        ("tests/engine/test_shaped_aux.py", "-k", "raise_by_name and calls"),
    ),
    Mutant(
        "sums of several dimensions cut in a wrong order", "engine/aux_values.py",
        "[part.view(shape) for part", "[part.flip(0).view(shape) for part",
        ("tests/engine/test_shaped_aux.py", "-k", "aux_of_any_shape and ddp"),
    ),
    Mutant(
        "ranks whose schedules are objects with other values", "step/callables.py",
        'yield from _items(getattr(fn, "__dict__", {}), seen)', "pass",
        ("tests/program/test_plan_texts.py", "-k", "rates_of_a_group and object"),
    ),
    Mutant(
        "ranks whose schedules are partials with other values", "step/callables.py",
        "yield from _items(fn.keywords, seen)", "pass",
        ("tests/program/test_plan_texts.py", "-k", "rates_of_a_group and partial"),
    ),
    Mutant(
        "matrices orthogonalised by shards", "optim/foreign.py", "if not (self.whole and _sharded(groups)):",
        "if True:", ("tests/optim/test_several.py", "-k", "muon_works"),
    ),
    Mutant(
        "bias correction that counts updates before a late start", "engine/updater.py",
        "number - part.starts if part.starts else number", "number",
        ("tests/optim/test_several.py", "-k", "late_start_equals and local"),
    ),
    Mutant(
        "a resumed run that forgets the size of its windows", "loop/scanning.py",
        "state.data, epochs), state.step)\n", "state.data, epochs), 0)\n",
        ("tests/data/test_windows.py", "-k", "resumed"),
    ),
    Mutant(
        "a machine that reads the copy of another", "checkpoint/machines.py",
        "lambda entry: (self.of[entry[0]] != self.here, entry[0])", "lambda entry: entry[0]",
        ("tests/checkpoint/test_machines.py", "-k", "layout_go_on and ddp"),
    ),
    Mutant(
        "gradients scaled by 1/1.01", "engine/passes.py", "multiplier = _ranks_over_weight(engine, weight)",
        "multiplier = _ranks_over_weight(engine, weight * 1.01)", (MATRIX, "-k", "local-fp32-acc1-none"),
    ),
    Mutant(
        "rounds of a mean of means", "engine/passes.py", "multiplier = multiplier_of(engine, weight,",
        "multiplier = multiplier_of(engine, weight * (1 if len(self._micro_batches) == 1 else 1.001),",
        (MATRIX, "-k", "ddp-fp32-acc3-none-2"),
    ),
    Mutant(
        "captured gradients not averaged", "strategies/captured_buckets.py", "_torch.begin_all_reduce(flat / self.size, self.group)", "flat",
        (COMPILED, "-k", "ddp-step-plain"),
    ),
    Mutant(
        "captured accumulation loses a micro-batch", "engine/gradients.py", "return carried + grad", "return grad",
        (COMPILED, "-k", "local-step-ragged"),
    ),
    Mutant(
        "a backward that failed goes on", "strategies/fsdp_engine.py", "recover=lambda: reset_shards(host)", "recover=None",
        ("tests/program/test_live_state.py", "-k", "backward_that_raises and fsdp"),
    ),
    Mutant(
        "an error in a captured step names another micro-batch", "program/captured_step.py",
        '        enter("captured step", index)\n', "", ("tests/program/test_notes.py", "-k", "local-True-label"),
    ),
    Mutant(
        "a compiled model of a factory runs without its compilation", "models/building.py",
        "        inner.forward = module.dynamo_ctx(inner.forward)\n", "", ("tests/models/test_models.py", "-k", "in_its_factory"),
    ),
    Mutant(
        "a state of inference tensors", "world/every_rank.py",
        "        with torch.inference_mode(False):\n", "        with torch.no_grad():\n", ("tests/program/test_notes.py", "-k", "inference and local and snapshots"),
    ),
    Mutant(
        "autocast stays on", "world/undo.py", "torch.set_autocast_enabled(self.kind, enabled)", "pass",
        ("tests/program/test_live_state.py", "-k", "autocast"),
    ),
    Mutant(
        "captured hooks count from one", "program/step_graph.py", "updates=given.number - 1", "updates=given.number",
        ("tests/laws/test_laws.py", "-k", "told_the_same"),
    ),
    Mutant(
        "hooks on captured gradients left out", "program/step_graph.py", "            return tail.run(engine, gradients, {}, info, apply)",
        "            apply()\n            return None",
        (COMPILED, "-k", "local-step-ragged"),
    ),
    Mutant(
        "hooks on gradients left out", "program/tail.py",
        "own = hook.on_gradients(grads, states.get(name), info)", "own = states.get(name)",
        (MATRIX, "-k", "local-fp32-acc1-clip"),
    ),
    Mutant(
        "captured shards not averaged over ranks", "strategies/whole_leaves.py",
        "self._outgoing(flat) / self._ranks", "self._outgoing(flat)",
        (COMPILED, "-k", "fsdp-step-plain"),
    ),
    Mutant(
        "gradient sync left on", "engine/engine.py", "with sync(index == n - 1):",
        "with sync(True):", (MATRIX, "-k", "fsdp-fp32-acc3-none-2"),
    ),
    Mutant(
        "gradient sync never on", "engine/engine.py", "with sync(index == n - 1):",
        "with sync(False):", (MATRIX, "-k", "ddp-fp32-acc3-none-2"),
    ),
    Mutant(
        "norm of one shard", "engine/gradients.py", "square = _torch.summed_over(square, self._over.group)", "pass",
        (MATRIX, "-k", "fsdp-fp32-acc1-clip-2"),
    ),
    Mutant(
        "clip before averaging", "engine/gradients.py",
        "return self._raw if self.multiplier is None else self._raw * abs(self.multiplier)",
        "return self._raw", (MATRIX, "-k", "local-fp32-acc1-clip"),
    ),
    Mutant(
        "weights of the last micro-batch only", "engine/totals.py",
        "weight if isinstance(self.weight, int) and self.weight == 0 else self.weight + weight", "weight",
        (MATRIX, "-k", "local-fp32-acc3-none"),
    ),
    Mutant(
        "fillers count", "engine/totals.py", "        if valid:\n            self._total", "        if True:\n            self._total",
        (ENGINES, "-k", "ragged_epochs"),
    ),
    Mutant(
        "skipped updates counted", "engine/left_out.py",
        "(1.0 - self.skip if isinstance(updates, torch.Tensor) else int(not self.skip))", "1",
        ("tests/transforms", "-k", "fp16_skips"),
    ),
    Mutant(
        "a rank stops by itself", "engine/stop_request.py", "self.agree(bool(count > 0))", "self.agree(self._asked)",
        ("tests/loop/test_preemption.py", "-k", "one_rank_is_told and plain and 0-ddp"),
    ),
    Mutant(
        "stopping forgets to save", "loop/autosave.py", "            self.save(self.last)\n            if self.plan.signals",
        "            if self.plan.signals", ("tests/loop/test_preemption.py", "-k", "complete or last_step"),
    ),
    Mutant(
        "a run begins anew over damage", "checkpoint/resuming.py", "        _go_on(failed", "        return state\n        _go_on(failed",
        ("tests/checkpoint/test_resume.py", "-k", "damaged"),
    ),
    Mutant(
        "a donated state stays usable", "state.py", "    if state._trees is _DONATED:\n        return",
        "    return", ("tests/program/test_program.py", "-k", "donated"),
    ),
    Mutant(
        "a live state that dies before the checks", "program/adopted.py", "    pairs = _matched(first, state)\n",
        "    begin()\n    pairs = _matched(first, state)\n", ("tests/program/test_refused_adopts.py", "-k", "transforms"),
    ),
    Mutant(
        "half a step is adopted", "program/adopted.py", "    _check_counts(state)\n", "",
        ("tests/program/test_refused_adopts.py", "-k", "whole_number"),
    ),
    Mutant(
        "given parameters that a unit ignores", "strategies/fsdp_engine.py", "    _guard(built)\n", "",
        ("tests/strategies/test_given_parameters.py", "-k", "right_or_refused and fsdp-halved"),
    ),
    Mutant(
        "given parameters that a method ignores", "strategies/_torch.py",
        "    state._pre_forward = _ShardGuard(slots, refuse, state._pre_forward)\n", "",
        ("tests/strategies/test_given_parameters.py", "-k", "right_or_refused and fsdp-in_a_method"),
    ),
    Mutant(
        "a block recomputed with other parameters", "transforms/rematerialisation.py",
        "            run = _twice_alike(run, module)\n", "            pass\n",
        ("tests/strategies/test_given_parameters.py", "-k", "recomputed_block_with and local"),
    ),
    Mutant(
        "an expression that renames nothing", "checkpoint/choosing.py", "    if unused:\n", "    if False:\n",
        ("tests/checkpoint/test_partial.py", "-k", "bad_patterns"),
    ),
    Mutant(
        "a held tree stays usable", "state.py", "        _kill(value)\n", "        pass\n",
        ("tests/program/test_held_trees.py", "-k", "average_over_held"),
    ),
    Mutant(
        "a nested tree stays usable", "state.py", "            if isinstance(entry, dict):\n                _kill",
        "            if False:\n                _kill", ("tests/program/test_held_trees.py", "-k", "nested"),
    ),
    Mutant(
        "ema forgets to move", "transforms/averaging.py", "shards, weight)", "shards, 0.0)",
        ("tests/transforms", "-k", "ema_follows"),
    ),
    Mutant(
        "a score of weight 0 is NaN", "step/loss.py",
        "return counted(_as_tensor(leaf.total, where), weight), weight", "return _as_tensor(leaf.total, where), weight",
        ("tests/engine/test_weights.py", "-k", "scores_and_aux and local"),
    ),
    Mutant(
        "averages of buffers stay", "program/instance.py",
        "if self._buffer_averages and left_out.uncounted is not True:", "if False:",
        ("tests/transforms/test_averaged_buffers.py", "-k", "those_of_torch and local-1-eager"),
    ),
    Mutant(
        "buffers of ranks that differ are one score", "loop/evaluating.py",
        "if len(set(gather_objects(digest, over=group))) > 1:", "if False:",
        ("tests/transforms/test_averaged_buffers.py", "-k", "different_buffers"),
    ),
    Mutant(
        "gathered parameters go stale", "strategies/fsdp_engine.py", "            unit.reshard()", "            pass",
        (ENGINES, "-k", "never_stale"),
    ),
    Mutant(
        "a reduce that forgets its scale", "collectives/reduction.py",
        "total = _scaled(total, scale / where.size if op == \"mean\" else scale)",
        "total = _scaled(total, 1 / where.size if op == \"mean\" else 1.0)", ("tests/collectives/test_reduce.py",),
    ),
    Mutant(
        "a swapped rank in the order", "data/order.py",
        "first = self.start + j * self.step + self.offset",
        "first = self.start + j * self.step + (self.offset if j % 2 else self.step - self.size - self.offset)",
        ("tests/data/test_order.py",),
    ),
    Mutant(
        "what is replaced goes first", "checkpoint/disk/durable.py", "        rename(target, aside)",
        "        remove(target)", ("tests/checkpoint/test_faults.py", "-k", "every_write_point"),
    ),
    Mutant(
        "the newest checkpoints go", "checkpoint/disk/retention.py", "old = existing[: -self.keep]", "old = existing[self.keep :]",
        ("tests/checkpoint/test_background.py", "-k", "retention"),
    ),
    Mutant(
        "a file is renamed before the device holds it", "checkpoint/disk/durable.py", "        sync(number)\n", "",
        ("tests/checkpoint/test_faults.py", "-k", "in_order"),
    ),
    Mutant(
        "a failed save in the background is silent", "checkpoint/background.py",
        "if any(gather_objects(failed is not None, world=self._world)) and saving.error is not None:", "if False:",
        ("tests/checkpoint/test_background.py", "-k", "told_on_every_rank"),
    ),
    Mutant(
        "shards are placed at the beginning", "checkpoint/format/boxes.py", "Box(_torch.local_offset(value), tuple(local.shape))",
        "Box((0,) * local.dim(), tuple(local.shape))", ("tests/laws/test_any_layout.py",),
    ),
    Mutant(
        "a reader cuts at its own offset", "checkpoint/reading.py", "cut[shared.within(block.box)]",
        "cut[shared.within(box)]", ("tests/laws/test_any_layout.py",),
    ),
    Mutant(
        "the data position lags a batch", "data/indexed.py", "self.first.start + (j + 1) * together",
        "self.first.start + j * together", ("tests/laws/test_resume.py", "-k", "law_14"),
    ),
    Mutant(
        "the data position forgets the ranks", "data/indexed.py", "self.first.start + (j + 1) * together",
        "self.first.start + (j + 1) * self.first.size", ("tests/laws/test_resume.py", "-k", "other_ranks"),
    ),
    Mutant(
        "an iterable is read from its beginning", "data/stream.py", "        if after <= reading.start:\n            continue\n", "",
        ("tests/laws/test_resume.py", "-k", "law_14"),
    ),
    Mutant(
        "a transform around a train step is dropped", "step/step.py", 'if _marked(step, "made_of_step") or', "if",
        ("tests/step/test_losses.py", "-k", "goes_around_a_loss"),
    ),
    Mutant(
        "gradients of a user's transform are not checked", "program/tail.py", "if self.skips and self.users:  # what",
        "if False:  # what", ("tests/program/test_gradient.py", "-k", "either_side and local"),
    ),
    Mutant(
        "a collective in a loss cuts the gradient", "collectives/signature.py", "return leaf.grad_fn is not None and", "return False and",
        ("tests/collectives/test_gather.py", "-k", "cut_in_silence and pad"),
    ),
    Mutant(
        "the random streams are forgotten", "checkpoint/restoring.py", "if restorer.refilled and not chosen.partly:", "if False:",
        ("tests/checkpoint/test_user_state.py", "-k", "streams"),
    ),
    Mutant(
        "buckets move after the first backward", "strategies/ddp.py", "fixed=options.buckets == \"fixed\"", "fixed=False",
        ("tests/checkpoint/test_layouts.py", "-k", "any_other and ddp"),
    ),
    Mutant(
        "checksums are not compared", "checkpoint/reading.py", "if verify and directory.open(name, durable.checksum_of) != record.crc32:",
        "if False:", ("tests/checkpoint/test_restore.py",),
    ),
    Mutant(
        "a reader opens files by their path", "checkpoint/disk/directory.py", "return opener(_NUMBERS / str(self._file) / name)",
        "return opener(self.path / name)", ("tests/checkpoint/test_replaced.py", "-k", "law_17_a_checkpoint_that_is_replaced"),
    ),
    Mutant(
        "ranks open different checkpoints", "checkpoint/restoring.py", "if None not in digests and len(set(digests)) == 1:",
        "if None not in digests:", ("tests/checkpoint/test_replaced.py", "-k", "all_ranks"),
    ),
    Mutant(
        "a manifest is not compared with its checksum", "checkpoint/format/manifest.py",
        'if f"{checksum:08x}".encode() != matched[1]:', "if False:", ("tests/checkpoint/test_manifest.py", "-k", "flipped"),
    ),
    Mutant(
        "adopt takes damaged values", "interchange/adopting.py", "    source.verify(world.rank, world.size)\n", "",
        ("tests/interchange/test_hostile.py", "-k", "leaves_the_state_live"),
    ),
    Mutant(
        "deepspeed is not told the weight", "strategies/deepspeed/update.py",
        "optimizer.loss_scale = 1.0 / factor if factor else math.inf", "optimizer.loss_scale = 1.0",
        ("tests/strategies/deepspeed/test_parity.py", "-k", "zero2-fp32-acc3-clip-1"),
    ),
    Mutant(
        "deepspeed's fp32 values stay rounded", "strategies/deepspeed/runtime.py", "parts.write(named[name], value)", "pass",
        ("tests/strategies/deepspeed/test_state.py", "-k", "half and 2"),
    ),
    Mutant(
        "what a failed step left is added up", "strategies/deepspeed/runtime.py", "        optimizer.zero_grad()\n", "",
        ("tests/strategies/deepspeed/test_features.py", "-k", "fails and 3"),
    ),
    Mutant(
        "what is restored is not given back to the runtime", "program/state_owner.py", "                    target.copy_(value)",
        "                    pass", ("tests/strategies/deepspeed/test_state.py", "-k", "half and 3"),
    ),
    Mutant(
        "the forward keeps its old partition", "strategies/deepspeed/parts.py", "shard.data.copy_(piece)", "pass",
        ("tests/strategies/deepspeed/test_state.py", "-k", "goes_back and persistence"),
    ),
    Mutant(
        "an engine inherits the group of another", "strategies/deepspeed/comm.py",
        "    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None\n", "",
        ("tests/strategies/deepspeed/test_features.py", "-k", "copy or offloaded"),
    ),
    Mutant(
        "gradients of an interrupted step stay", "engine/engine.py", "        self.clear()\n        for restore", "        for restore",
        ("tests/laws/test_interrupts.py", "-k", "local-1"),
    ),
    Mutant(
        "buffers of an interrupted step stay moved", "models/moving_buffers.py", "_give_back(tensor, self._copies[index])", "pass",
        ("tests/laws/test_interrupts.py", "-k", "local-1"),
    ),
    Mutant(
        "a Ctrl-C cuts the end of a swap", "world/undo.py", "if frame.f_code in ends and", "if False and",
        ("tests/laws/test_interrupts.py", "-k", "whatever_line_of_its_ends"),
    ),
    Mutant(
        "units of an interrupted look stay gathered", "engine/engine.py", 'self.unfinished.add("look")', "pass",
        ("tests/laws/test_interrupts.py", "-k", "for_a_while and fsdp-evaluate"),
    ),
    Mutant(
        "half of the modules stay in training mode", "models/module_modes.py",
        "before, self._evaluating = self._evaluating, None", "before, self._evaluating = self._evaluating, True",
        ("tests/laws/test_interrupts.py", "-k", "for_a_while and local-look"),
    ),
    Mutant(
        "hooks of an interrupted forward fire in the next", "strategies/ddp.py", "            wrapped.begin_anew()\n", "",
        ("tests/laws/test_interrupts.py", "-k", "ddp-1"),
    ),
    Mutant(
        "a weight of zero is an update", "step/loss.py", "    return not 0 < weight < math.inf", "    return False",
        ("tests/engine/test_weights.py", "-k", "weight_of_zero"),
    ),
    Mutant(
        "a captured step keeps the first value of a schedule", "optim/chain_kernel.py",
        "        if isinstance(rate, dict):  # scheduled numbers", "        if False:  # scheduled numbers",
        ("tests/optim/test_scheduled_options.py", "-k", "captured_without and adamw"),
    ),
    Mutant(
        "the fused kernel keeps the first value of a schedule", "optim/fused.py",
        "work.numbers_of({**work.group.options, **rate})", "work.numbers",
        ("tests/optim/test_scheduled_options.py", "-k", "equals_torch and sgd-eager"),
    ),
    Mutant(
        "a group takes the schedule of its optimizer", "optim/description.py",
        "        numbers = (*_scheduled_in(optimizer, base), *_scheduled_in(optimizer, extra, name))\n",
        "        numbers = (*_scheduled_in(optimizer, dict(optimizer.options)),)\n",
        ("tests/optim/test_scheduled_options.py", "-k", "of_their_own and adamw"),
    ),
    Mutant(
        "an average forgets by the number of the next update", "engine/updater.py",
        "self.scheduled(self._ema_decay, updates)", "self.scheduled(self._ema_decay, updates + 1)",
        ("tests/transforms/test_scheduled_decay.py", "-k", "follow_the_schedule and warmup-eager"),
    ),
    Mutant(
        "averages of buffers keep the first decay", "program/instance.py",
        'decay = metrics["ema_decay"] if callable(decay) else decay', "decay = decay(0)",
        ("tests/transforms/test_scheduled_decay.py", "-k", "buffers_too and eager"),
    ),
    Mutant(
        "the head falls as the last block does", "optim/description.py",
        "max(numbers[lists[0]]) + 2 if", "max(numbers[lists[0]]) + 1 if",
        ("tests/optim/test_layer_decay.py", "-k", "layers_by_name"),
    ),
    Mutant(
        "rates of groups don't fall by layer", "optim/description.py",
        "ScaledSchedule(lr or optimizer.lr, factor)", "lr or ScaledSchedule(optimizer.lr, factor)",
        ("tests/optim/test_layer_decay.py", "-k", "of_their_own"),
    ),
    Mutant(
        "losses of two kinds are added up", "engine/totals.py", "self.weighted is not parts.weighted", "False",
        ("tests/engine/test_weights.py", "-k", "micro_batches_raise"),
    ),
    Mutant(
        "averages are saved for parameters", "state.py", "if lease is not None and lease.averaged:", "if False:",
        ("tests/program/test_live_state.py", "-k", "TestAverages"),
    ),
    Mutant(
        "shards draw the same noise", "engine/user_draws.py", "        if not sharded:", "        if True:",
        ("tests/engine/test_user_draws.py", "-k", "3-fsdp"),
    ),
    Mutant(
        "a replaced parameter is not noticed", "models/trained_modules.py", "        owner.suspicious = True", "        pass",
        ("tests/program/test_live_state.py", "-k", "was_replaced_raises"),
    ),
    Mutant(
        "an exchange is not undone", "engine/exchange.py", "            self._kept.pop()", "            self._kept.clear()",
        ("tests/program/test_live_state.py", "-k", "TestAverages"),
    ),
    Mutant(
        "a pair in work is taken for untouched", "engine/exchange.py", "                self._kept[-1] = (value,)\n", "",
        ("tests/program/test_live_state.py", "-k", "TestAverages"),
    ),
    Mutant(
        "what can't be put back at once is lost", "world/undo.py",
        "            try:\n                self.undo()\n", "            try:\n                raise\n",
        ("tests/program/test_live_state.py", "-k", "TestAverages"),
    ),
    Mutant(
        "a rank leaves without a word", "world/watcher.py",
        "            self._board.client.add(\"left\", 1)", "            raise RuntimeError", ("tests/launch/test_uneven.py", "-k", "leaves_is_named and closes"),
    ),
    Mutant(
        "waiting ranks do not compare their calls", "world/stalls.py", "if number is not None:", "if False:",
        ("tests/world/test_faults.py", "-k", "first_call_that_differs"),
    ),
    Mutant(
        "the store listens on all interfaces", "world/joining.py", "if ranks.machines > 1 or not is_loopback(address):",
        "if True:", ("tests/launch/test_uneven.py", "-k", "loopback"),
    ),
    Mutant(
        "ranks of split data end with their own part", "data/presplit.py",
        'if all(ended) or (remainder == "drop" and any(ended)):', "if any(ended):",
        ("tests/data/test_presplit.py", "-k", "own_part_whole"),
    ),
    Mutant(
        "batches that wait in the loader's buffer", "data/stream.py", "        trees = map(copied, trees)", "        pass",
        ("tests/data/test_reused_buffers.py", "-k", "rings and torch and 1-4"),
    ),
    Mutant(
        "boxes of a picture that are cut as columns", "data/cut.py", "elif structure not in _records:", "elif False:",
        ("tests/data/test_cut.py", "-k", "rows_or_columns"),
    ),
    Mutant(
        "the rest of an epoch in the order of the first", "data/stream.py", "same = reading.epoch == 0 or not", "same = True or not",
        ("tests/data/test_streams_of_datasets.py", "-k", "shuffled and plain and 1-"),
    ),
    Mutant(
        "metadata of all rows in each part", "data/cut.py", "return not any(type(item) not in _PLAIN and _holds_rows(item) for item in node)",
        "return not any(type(item) not in _PLAIN for item in node)", ("tests/data/test_cut.py", "-k", "without_tensors and dicts"),
    ),
    Mutant(
        "as many boxes as channels are rows", "data/cut.py", "        if len(self._lists) > 1:\n", "        if False:\n",
        ("tests/data/test_cut.py", "-k", "boxes_are_no_rows"),
    ),
    Mutant(
        "chosen with chosen", "data/micro_batches.py", "        per_sample, samples = batch.per_sample, batch.samples\n", "",
        ("tests/data/test_pairs.py", "-k", "raw_loop and 2-local-map"),
    ),
    Mutant(
        "x to rank 0 and y to rank 1", "collectives/splitting.py", "return dict(enumerate(inputs)) if any(", "return None if any(",
        ("tests/collectives/test_split.py", "-k", "batches_and"),
    ),
    Mutant(
        "experts that all lie on the first ranks", "strategies/shard_dims.py", "if experts or (", "if (",
        ("tests/strategies/test_shard_dims.py", "-k", "experts_leave"),
    ),
    Mutant(
        "captured gradients in the order of other rows", "strategies/whole_leaves.py", "return value.movedim(self.dim, 0) if self.dim else value", "return value",
        ("tests/strategies/test_shard_dims.py", "-k", "raw_loop and True-Net and fsdp-"),
    ),
    Mutant(
        "second moments rounded to 0", "optim/quantized.py", "return _values(256, linear=64, decades=11).float()",
        "return torch.cat([torch.zeros(1), _values(255, linear=64, decades=5)]).float()",
        ("tests/optim/test_eight_bit.py", "-k", "moves_far"),
    ),
    Mutant(
        "a resumed run has its whole patience again", "loop/evaluating.py", "if record is not None and (record.kept_by.metric", "if False and (record.kept_by.metric",
        ("tests/loop/test_evaluation.py", "-k", "decides_as_one"),
    ),
    Mutant(
        "an evaluation that is NaN improves", "loop/evaluating.py", "if not math.isfinite(value):", "if False:",
        ("tests/loop/test_evaluation.py", "-k", "best_checkpoints_stay"),
    ),
    Mutant(
        "the best checkpoint goes with the old ones", "checkpoint/disk/retention.py", "kept = {written} | best_steps(existing)", "kept = {written}",
        ("tests/loop/test_evaluation.py", "-k", "saves_by_hand"),
    ),
    Mutant(
        "a loop saves between two updates on one batch", "loop/evaluating.py", "return (state.step - self.began) % self.updates_per_batch == 0", "return True",
        ("tests/loop/test_work.py", "-k", "several_updates_on_one_rollout"),
    ),
    Mutant(
        "a maximum over ranks is their mean", "engine/aux_values.py", "values.append(kind.fold(found))", "values.append(found.float().mean(0))",
        ("tests/step/test_extremes.py", "-k", "in_aux_of_a_step"),
    ),
    Mutant(
        "a maximum over micro-batches is the last one's", "engine/aux_values.py", "[leaf.fold(seen)[None] if len(seen) else seen]", "[seen[-1:]]",
        ("tests/step/test_extremes.py", "-k", "in_aux_of_a_step"),
    ),
    Mutant(
        "the gradient of gathered rows is this rank's alone", "collectives/reduction.py",
        '((_, total),) = _communicated(ctx.where, [grad], "sum", carrier)', "total = grad.reshape(-1)",
        ("tests/collectives/test_gradient.py", "-k", "those_of_one_process and 2-of_own and ddp"),
    ),
    Mutant(
        "a model without an optimizer is in training mode", "program/instance.py", "trained = [key in optimizers for", "trained = [True for",
        ("tests/program/test_frozen_models.py", "-k", "evaluation_mode and local"),
    ),
    Mutant(
        "a copy of a model has other values", "models/building.py", "copy.deepcopy(modules[source]) if", "_one(parts[source], key, empty=empty) if",
        ("tests/program/test_frozen_models.py", "-k", "evaluation_mode and local"),
    ),
    Mutant(
        "a mixture has one order in all epochs", "data/mixing.py", "hash((self._seed, epoch, number, walk))", "hash((self._seed, number, walk))",
        ("tests/data/test_mixing.py", "-k", "order_of_its_own"),
    ),
    Mutant(
        "weights of a mixture begin anew in each epoch", "data/mixing.py", "self._starts.append(self._starts[-1] + count)", "self._starts.append(0)",
        ("tests/data/test_mixing.py", "-k", "samples_of_the_run"),
    ),
    Mutant(
        "a source of weight 0 that is behind gives a row", "data/mixing.py", "max((each for each in range(count) if now[each]), key=", "max(range(count), key=",
        ("tests/data/test_mixing.py", "-k", "weight_0_gives_nothing"),
    ),
    Mutant(
        "a generator of a source goes on where it was", "data/mixing.py", "            generator.manual_seed(int(torch.randint(1 << 62, ())))\n", "            pass\n",
        ("tests/data/test_mixing.py", "-k", "in_its_order_with_map_style"),
    ),
    Mutant(
        "a stream that begins again is in the order of the epoch", "data/mixing.py", "told(self._epoch + walk * _WALKS)", "told(self._epoch)",
        ("tests/data/test_mixing.py", "-k", "another_epoch_for_each_walk"),
    ),
]  # fmt: skip
