"""Deliberate bugs in the care for modules: their modes, their memory, their hooks and their buffers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BACKGROUND = "tests/transforms/test_background.py"
TRAPS = "tests/parity/test_traps.py"
INFO = "tests/step/test_loss_info.py"
DIMS = "tests/strategies/test_shard_dims.py"
LAYOUT = "tests/program/test_layout_shown.py"
MODES = "tests/models/test_modes.py"
NORM_PARITY = "tests/parity/test_batch_norm.py"
NORMS = "tests/transforms/test_batch_statistics.py"

MUTANTS = [
    Mutant(
        "captured fsdp: gradients are reduced after backward", "strategies/fsdp_regather.py",
        "    _reduce_when_ready(graph, {unit.group for unit in units})\n", "",
        ("tests/parity/test_regather.py", "-k", "activations and not units"),
    ),
    Mutant(
        "captured ddp: a rank's zeros are sent before the bucket of the others", "strategies/captured_buckets.py",
        "if in_order and place", "if False and place", ("tests/parity/test_capturing.py", "-k", "reduction_begins"),
    ),
    Mutant(
        "captured fsdp: ranks that use other blocks gather in other orders", "program/captured_step.py",
        "            self._compile(None)", "            pass", ("tests/parity/test_regather.py", "-k", "use_other"),
    ),
    Mutant(
        "captured fsdp: what is gathered lives as long as a bias", "strategies/whole_leaves.py",
        "torch.ops.fnaccel.copied_parts if torch.compiler.is_compiling() else _copied_parts", "_copied_parts",
        ("tests/parity/test_regather.py", "-k", "activations and not units"),
    ),
    Mutant(
        "kernels: all of a graph are its first", "transforms/first_loss/_torch.py", "return found[number]", "return found[0]",
        ("tests/transforms/test_first_loss.py", "-k", "one_file and two and kernels_of"),
    ),
    Mutant(
        "kernels: a macro of one counts for all", "transforms/first_loss/translation_unit.py",
        "return not _DIRECTIVE.search(kernel)", "return True", ("tests/transforms/test_first_loss.py", "-k", "macro"),
    ),
    Mutant(
        "kernels: a file that g++ refuses ends the step", "transforms/first_loss/_torch.py", "except exc.CppCompileError:",
        "except ZeroDivisionError:", ("tests/transforms/test_first_loss.py", "-k", "by_themselves and two"),
    ),
    Mutant(
        "products: the second factor is transposed", "transforms/products/_torch.py", "(a, b.t(), dense,", "(a, b, dense,",
        ("tests/transforms/test_products.py", "-k", "as_they_are or transposed"),
    ),
    Mutant(
        "products: the strides of a bias are left out", "transforms/products/_torch.py", "bias.contiguous()", "bias",
        ("tests/transforms/test_products.py", "-k", "stride or number"),
    ),
    Mutant(
        "products: small ones are replaced, too", "transforms/products/_torch.py", "rows * columns * inner >= LEAST", "inner",
        ("tests/transforms/test_products.py", "-k", "others_stay"),
    ),
    Mutant(
        "a rank goes over to compiled code alone", "transforms/background/process.py", "== self._world.size", ">= 0",
        (BACKGROUND, "-k", "ddp and auto"),
    ),
    Mutant(
        "a number of a step goes over sooner", "transforms/background/process.py", "if self._at is not None and step >= self._at:",
        "if self._at is not None and self._begun and self._ended:", (BACKGROUND, "-k", "uncompiled_before and step"),
    ),
    Mutant(
        "a step that another process compiles is compiled here", "transforms/compilation.py", "compiled() if process.over else fn",
        "compiled()", (BACKGROUND, "-k", "uncompiled_before and step"),
    ),
    Mutant(
        "a parameter that is used later ends a trace without a reason", "_torch.py", "graph_break(msg=reason)", "graph_break(reason)",
        ("tests/optim/test_absent_gradients.py", "-k", "used_later and sgd"),
    ),
    Mutant(
        "an uncompiled captured step leaves out its update", "program/step_graph.py",
        'filled(is_uncounted(metrics["weight"]), torch.float32, device)', 'is_uncounted(metrics["weight"]) or torch.ones(())',
        (BACKGROUND, "-k", "alike and ema and ddp"),
    ),
    Mutant(
        "an error of g++ is taken for the limit of recompilations", "program/compile_meter.py",
        "type(error).__name__.lower()", "str(error).lower()", ("tests/transforms/test_first_loss.py", "-k", "limit"),
    ),
    Mutant(
        "a frozen batch norm is thawed by an evaluation", "models/module_modes.py",
        'vars(module)["training"] = training', 'vars(module)["training"] = True',
        (TRAPS, "-k", "evaluation and sgd-local-eager"),
    ),
    Mutant(
        "modes are not put back after a look that raises", "program/model_access.py",
        "            instance.module_modes.switch_back(evaluating)", "            pass", (MODES, "-k", "raises-local"),
    ),
    Mutant(
        "a parameter with gaps takes the fused kernel", "optim/fused.py",
        'shard.device.type != "xla" and memory_of(shard) == "dense"', 'shard.device.type != "xla"', (TRAPS, "-k", "gaps and local-eager"),
    ),
    Mutant(
        "batch norms compute with weights in bf16", "strategies/shard_dims.py",
        "None if id(named[name]) in norms else _first_dim(", "_first_dim(", (NORM_PARITY, "-k", "autocast and bf16-fsdp-one"),
    ),
    Mutant(
        "a rotary table is cast to its cosine", "models/_torch.py",
        "value.to(dtype) if value.dtype in kinds else value", "value.to(dtype)",
        (TRAPS, "-k", "complex and buffers and bf16-sgd-local-eager"),
    ),
    Mutant(
        "gradients of numbers are left apart", "strategies/shard_dims.py", "if not shape or 0 in shape:", "if 0 in shape:",
        (TRAPS, "-k", "scalars and fsdp-eager"),
    ),
    Mutant(
        "hooks see the gradient of the sum", "program/instance.py", "backward_hooks=self.gradient_hooks.present", "backward_hooks=False",
        (TRAPS, "-k", "module and hooks and local-eager"),
    ),
    Mutant(
        "what hooks are not to see stays out of the gradients", "engine/passes.py", "float(self._unseen)", "1.0",
        (TRAPS, "-k", "module and hooks and ddp-eager"),
    ),
    Mutant(
        "hooks see the gradient of the mean of ranks", "engine/passes.py",
        "gradient_size / unseen", "gradient_size",
        (TRAPS, "-k", "module and hooks and ddp-eager"),
    ),
    Mutant(
        "a parameter that takes a gradient later is not noticed", "models/trained_modules.py",
        "if frozen and self._frozen and any(map(_takes_gradient, self._frozen)):", "if False:",
        ("tests/models/test_gradient_hooks.py", "-k", "after_init and local"),
    ),
    Mutant(
        "averages in the dtype of the parameters", "program/parameter_averages.py",
        "tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)", "tensor.clone()",
        ("tests/transforms/test_averaging.py", "-k", "move and local-1-eager"),
    ),
    Mutant(
        "buffers stay apart", "program/instance.py", "self.shared_buffers.share(step)", "pass",
        (NORMS, "-k", "first_rank_s_buffers and fsdp-eager"),
    ),
    Mutant(
        "a filler counts in batch norm", "engine/passes.py", "engine.hooks.micro_batch(counts)",
        "engine.hooks.micro_batch(True)", (NORMS, "-k", "same_micro_batches and filler and ddp"),
    ),
    Mutant(
        "statistics are not differentiated over ranks", "models/synced_norm.py",
        "dist.all_reduce(sums, group=ctx.scope.group)", "sums = sums * 2",
        (NORMS, "-k", "same_micro_batches and ddp-one"),
    ),
    Mutant(
        "running variance over the rows of a rank", "models/synced_norm.py", "(count / (count - 1).clamp(min=1))",
        "(count / (count / 2 - 1).clamp(min=1) / 2)", (NORMS, "-k", "same_micro_batches and ddp-one"),
    ),
    Mutant(
        "the second run of a block moves buffers", "transforms/rematerialisation.py",
        "with moving.holding(before), second:", "with second:",
        ("tests/transforms/test_remat.py", "-k", "moves_no_buffer"),
    ),
    Mutant(
        "a doubled row does not tell a mean", "program/doubled_row.py", "stays = not mean.of_mean and _close(total_2, total)",
        "stays = False", ("tests/program/test_doubled_row.py", "-k", "wrong_total and local"),
    ),
    Mutant(
        "a mean for a total is not noticed", "step/total_graph.py", 'if kinds and kinds <= {"mean", "part"} and not looped:', "if not kinds:",
        ("tests/step/test_total_graph.py", "-k", "mean_is_seen"),
    ),
    Mutant(
        "a mean times its rows is taken for a mean", "step/total_graph.py", "if counts & {*lasting}:", "if not counts:",
        ("tests/step/test_total_graph.py", "-k", "sum_is_seen"),
    ),
    Mutant(
        "a penalty hides a mean", "step/total_graph.py", ' if term[0] != "penalty"', "", ("tests/step/test_total_graph.py", "-k", "mean_is_seen"),
    ),
    Mutant(
        "a buffer of the first forward stays after a check", "models/moving_buffers.py", "            slot.clear()\n", "",
        ("tests/program/test_doubled_row.py", "-k", "as_before"),
    ),
    Mutant(
        "a resized buffer keeps its size", "models/moving_buffers.py",
        "buffer if buffer.shape == before.shape else buffer.resize_(before.shape)", "buffer",
        ("tests/models/test_models.py", "-k", "resizes and failure"),
    ),
    Mutant(
        "a second gradient moves buffers", "models/moving_buffers.py", "                _give_back(buffer, before)", "                pass",
        ("tests/program/test_second_gradient.py", "-k", "no_trace and local"),
    ),
    Mutant(
        "random numbers by the order of passes", "engine/passes.py", "self._inputs.seed(index)",
        "self._inputs.seed(self._open)", ("tests/engine/test_order_of_passes.py", "-k", "same_bits and local-1"),
    ),
    Mutant(
        "a second gradient in the memory of the first", "program/second_gradient.py", "_torch.foreach_copy_(ours, kept)", "pass",
        ("tests/program/test_second_gradient.py", "-k", "no_trace and ddp"),
    ),
    Mutant(
        "gradients taken in a layout that is not the parameter's", "engine/gradients.py",
        "value = value.redistribute(leaf.shown.device_mesh, layout)", "pass",
        ("tests/transforms/test_layouts_of_gradients.py", "-k", "tensor"),
    ),
    Mutant(
        "a left-out update moves states of users", "program/tail.py", "states[name] = first if skip else last",
        "states[name] = last", ("tests/transforms/test_left_out_states.py", "-k", "eager"),
    ),
    Mutant(
        "a step that the device leaves out moves states of users", "program/tail.py",
        "(self.skips or grads.uncounted is not None)", "self.skips",
        ("tests/transforms/test_left_out_states.py", "-k", "device_leaves_out"),
    ),
    Mutant(
        "a step without a row counts as one that is not finite", "engine/left_out.py",
        "self.skip * (1.0 - self.uncounted) if isinstance(self.uncounted, torch.Tensor) else self.skip", "self.skip",
        ("tests/transforms/test_left_out_states.py", "-k", "no_gradients"),
    ),
    Mutant(
        "transforms of one name share a state", "step/step.py",
        'transform = attrs.evolve(transform, name=f"{transform.name}.{number}")',
        "del number", ("tests/transforms/test_left_out_states.py", "-k", "twice"),
    ),
    Mutant(
        "a loop that is left by break saves nothing", "loop/leaving.py", "if loop_ends(inspect.currentframe()):",
        "if False:", ("tests/loop/test_left_loops.py", "-k", "by_break-plain"),
    ),
    Mutant(
        "ddp updates by gradients that were not averaged", "strategies/ddp.py", "        wrapped.check_reduced()\n", "        pass\n",
        ("tests/strategies/test_engines.py", "-k", "before_the_update"),
    ),
    Mutant(
        "a key that knows the rank", "engine/passes.py", "        return UpdateFacts(\n            self.root,",
        "        return UpdateFacts(\n            self.root + self.rank,", (INFO, "-k", "a_mask and 2-ddp-1-nothing"),
    ),
    Mutant(
        "a key folded with the micro-batch", "engine/update_facts.py", "        return self.at(self._rows(part), valid)\n",
        "        self._key = self._key.fold_in(1)\n        return self.at(self._rows(part), valid)\n",
        (INFO, "-k", "a_mask and 1-local-4"),
    ),
    Mutant(
        "copies of rows count in info", "engine/update_facts.py", "part.valid > 0", "True", (INFO, "-k", "do_not_count"),
    ),
    Mutant(
        "rows counted from the rank's own start", "data/indexed.py",
        "after, mine.offset, together)", "after, 0, together)",
        (INFO, "-k", "a_mask and 2-ddp-1-nothing"),
    ),
    Mutant(
        "rows counted from the micro-batch's own start", "data/micro_batches.py",
        "first = None if first is None else first + size", "pass", (INFO, "-k", "a_mask and 1-local-4"),
    ),
    Mutant(
        "numbers of extras are compiled in", "engine/update_facts.py", "extras = tree.map(self._as_input, extras)", "pass",
        (INFO, "-k", "one_graph"),
    ),
    Mutant(
        "keys are folded in the sequence of the numbers", "random.py", "return Key(_mixed((self.bits ^ _FOLDS) + counter))",
        "return Key(_mixed(self.bits + counter))", ("tests/promises/test_random.py", "-k", "no_number_of_its_parent"),
    ),
    Mutant(
        "extras are replaced under the old lease", "state.py", "return owner.succeed(following(self, extras=extras))",
        "return following(self, extras=extras)", ("tests/checkpoint/test_user_state.py", "-k", "moves_the_lease"),
    ),
    Mutant(
        "dimensions that were asked for are left out of the graph", "strategies/fsdp_captured.py",
        "shard_dims(built, mesh.degrees, options)", "shard_dims(built, mesh.degrees, Fsdp())", (DIMS, "-k", "asked_for and True"),
    ),
    Mutant(
        "the last pattern of dims counts", "strategies/shard_dims.py", "dims.setdefault(name, dim)", "dims[name] = dim",
        (DIMS, "-k", "asked_for and False"),
    ),
    Mutant(
        "a drawing whose packed matrices are one", "program/parameter_layout.py", 'getattr(placement, "split_factor", 1)',
        'getattr(placement, "none", 1)', (LAYOUT, "-k", "hold and packed and 2"),
    ),
    Mutant(
        "dimensions of a Conv1D as those of a Linear", "strategies/tensor/record.py", "if style == layer.features[0]:",
        "if style == 0:", ("tests/strategies/tensor/test_parity.py", "-k", "own_weight"),
    ),
    Mutant(
        "a position is taken up in another order", "data/source_facts.py",
        "    if accepts or harmless.issuperset(changed):", "    if True:",
        ("tests/checkpoint/test_changed_runs.py", "-k", "means_other"),
    ),
    Mutant(
        "a sampler's own generator moves on", "data/seeding.py", "        elif isinstance(value, torch_data.Sampler) or name == \"sampler\":\n",
        "        elif False:\n", ("tests/data/test_shard.py", "-k", "of_its_own_goes_on and NumPy and True"),
    ),
    Mutant(
        "a sampler in the order of another epoch", "data/shard.py", "    if not shards.presplit:  # then each", "    if False:  # then each",
        ("tests/checkpoint/test_changed_runs.py", "-k", "order_of_another"),
    ),
]  # fmt: skip
