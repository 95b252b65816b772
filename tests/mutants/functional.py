"""Deliberate bugs of parameters and gradients as values. Each would train otherwise without an error."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PARAMS = "tests/models/test_parameter_values.py"
ROWS = "tests/transforms/test_per_example.py"
PRIVACY = "tests/loop/test_privacy.py"
GRADIENT = "tests/program/test_gradient.py"
SECOND = "tests/program/test_second_gradient.py"
PROGRAMS = "tests/parity/test_programs.py"
WHOLE = "strategies/whole_leaves.py"

MUTANTS = [
    Mutant(
        "whole leaves kept over an update", WHOLE, "        self.drop()\n        used", "        used",
        (PARAMS, "-k", "raw_loop and fsdp-halved"),
    ),
    Mutant(
        "the gradient of a gathered parameter without the factor of ranks", WHOLE,
        "self._outgoing(flat) / self._ranks", "self._outgoing(flat)",
        (PARAMS, "-k", "raw_loop and fsdp-halved"),
    ),
    Mutant(
        "gradients of whole leaves in the place of those of hooks", WHOLE,
        "_torch.local_of(leaf.param.grad).add_(part)", "_torch.local_of(leaf.param.grad).copy_(part)",
        (PARAMS, "-k", "raw_loop and fsdp-both"),
    ),
    Mutant(
        "parameters of a look go stale", "strategies/fsdp_engine.py", "        leaves.drop()\n", "        pass\n",
        (PARAMS, "-k", "in_a_look"),
    ),
    Mutant(
        "a block runs again with its own parameters", "transforms/recomputed.py",
        "return run_given(module, params, _of_keywords", "return run_given(module, {}, _of_keywords",
        (PARAMS, "-k", "raw_loop and local-remat-halved"),
    ),
    Mutant(
        "the second run of a block draws other numbers", "transforms/recomputed.py",
        "first[0].put_back() if again else first.append(now)", "first.append(now)",
        (PARAMS, "-k", "dropout_of_a_block"),
    ),
    Mutant(
        "noise by rank", "transforms/per_example.py", "manual_seed(seed)", "manual_seed(seed + current(None).rank)",
        (ROWS, "-k", "whole_tensor"),
    ),
    Mutant(
        "the sum of rows divided by the weight", "transforms/per_example.py",
        "grad * (weight / self.rows)", "grad", (PRIVACY, "-k", "expected_rows and local"),
    ),
    Mutant(
        "rows drawn at the rate of one rank", "data/indexed.py", "self.expected / self.n",
        "self.expected / self.n / self.ranks", (PRIVACY, "-k", "expected_rows and ddp"),
    ),
    Mutant(
        "epsilon of noise that is not a multiple of the clip", "loop/privacy.py", "(noise.multiplier, rate, steps)",
        "(noise.multiplier * noise.clip, rate, steps)", (PRIVACY, "-k", "that_of_opacus"),
    ),
    Mutant(
        "values of an earlier update are taken", "strategies/whole_leaves.py", "                self._kept.append(weakref.ref(value))", "                pass",
        ("tests/transforms/test_kept_tensors.py", "-k", "earlier_update and True-None"),
    ),
    Mutant(
        "a loss of other parameters trains shards", "engine/passes.py", "            check_reached(grads, loss.where)", "            pass",
        ("tests/parity/test_traps.py", "-k", "foreign and fsdp and eager and sgd"),
    ),
    Mutant(
        "a gradient is shown before its noise", "transforms/per_example.py", "return self.multiplier > 0", "return False",
        (PRIVACY, "-k", "without_its_noise"),
    ),
    Mutant(
        "epsilon of other rows", "loop/privacy.py", "    if read != samples:", "    if False:",
        (PRIVACY, "-k", "other_shards"),
    ),
    Mutant(
        "noise of a shard as if it were whole", "transforms/per_example.py",
        "return tree.laid_out(whole, grad)", "return tree.laid_out(whole.flip(0) if hasattr(grad, 'placements') else whole, grad)",
        (ROWS, "-k", "whole_tensor"),
    ),
    Mutant(
        "rows clipped one parameter at a time", "transforms/row_gradients.py",
        "torch.stack([square.to(totals.dtype) for square in squares]).sum(0).sqrt()",
        "torch.stack([square.to(totals.dtype) for square in squares]).amax(0).sqrt()",
        (ROWS, "-k", "loop_over_rows and local-squares"),
    ),
    Mutant(
        "rows clipped by the norm of all of them", "transforms/per_example.py", "(self.clip / rows.norms)",
        "(self.clip / rows.norms.norm().expand_as(rows.norms))", (ROWS, "-k", "loop_over_rows and local-squares"),
    ),
    Mutant(
        "a gradient that moves buffers", "program/second_gradient.py",
        "        stack.enter_context(passes_put_back(instance.engine.layout.modules, StreamStates(inputs.streams)))\n", "",
        (GRADIENT, "-k", "buffers_dropout"),
    ),
    Mutant(
        "a second gradient at the first parameters", "transforms/perturbation.py", "info.gradients_at({**info.params, **moved})",
        "info.gradients_at(info.params)", (PROGRAMS, "-k", "sharpness-local and not captured"),
    ),
    Mutant(
        "a norm by shard", "tree/arithmetic.py", "                dist.all_reduce(part, group=mesh.get_group(dim))\n",
        "                pass\n", (GRADIENT, "-k", "arithmetic_on"),
    ),
    Mutant(
        "copies counted twice in a norm", "tree/arithmetic.py", "extend(value / copies for", "extend(value for",
        (GRADIENT, "-k", "arithmetic_on"),
    ),
    Mutant(
        "first gradients in the buckets of the second pass", "program/second_gradient.py",
        "is not None] if first.lent else []", "is not None] if False else []", (SECOND, "-k", "both_passes"),
    ),
    Mutant(
        "bools and small ints that wrap in a product", "tree/arithmetic.py", "value if value.is_complex() else value.long()",
        "value", ("tests/tree/test_tree.py", "-k", "int8"),
    ),
    Mutant(
        "a frozen function that freezes nothing", "models/building.py", "if takes(pattern, name, param)]",
        "if isinstance(pattern, str) and takes(pattern, name, param)]",
        ("tests/program/test_names_of_jax.py", "-k", "frozen"),
    ),
    Mutant(
        "whole values of another rank's layout", "program/adopted.py", "target.copy_(tree.laid_out(source, target))",
        "target.copy_(target if hasattr(target, 'placements') else source)",
        ("tests/program/test_refused_adopts.py", "-k", "laid_out_in_another_way and fsdp"),
    ),
    Mutant(
        "the step's own loss in the place of another", "program/second_gradient.py", "step = Step(loss, ",
        "step = Step(instance.spec.step.loss_fn, ", (SECOND, "-k", "two_losses and local"),
    ),
]  # fmt: skip
