"""Deliberate bugs of what saves memory: heads without whole logits, activations on the host, filled shards."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FUNCTION = "tests/losses/test_linear_cross_entropy.py"
HEADS = "tests/losses/test_chunked_head.py"
FILLED = "tests/strategies/test_filled.py"
WAITING, MEMORY = "tests/transforms/test_waiting.py", "transforms/waiting/host_memory.py"
CHUNKS, TARGETS, LOGITS = "losses/chunks.py", "losses/targets.py", "losses/logits.py"
VALUES, TRANSFORMS = "values_and_two_derivatives", "transforms_of_functions"

MUTANTS = [
    Mutant(
        "head: rows that are ignored get a gradient", CHUNKS, "scale = counted.to(wide) if factors is None",
        "scale = torch.ones_like(counted, dtype=wide) if factors is None", (FUNCTION, "-k", f"{VALUES} and sum"),
    ),
    Mutant(
        "head: the gradient of a weight is that of the last rows", CHUNKS, "grads[1].addmm_(", "grads[1].zero_().addmm_(",
        (FUNCTION, "-k", f"{VALUES} and sum"),
    ),
    Mutant(
        "head: factors of rows are left out", CHUNKS, "else counted * factors[part].to(wide)", "else counted.to(wide)",
        (FUNCTION, "-k", f"{VALUES} and none"),
    ),
    Mutant(
        "head: a z-loss has half its slope", CHUNKS, "1 + 2 * terms.z_loss", "1 + terms.z_loss", (FUNCTION, "-k", VALUES),
    ),
    Mutant(
        "head: a capped logit has the slope of one that is not", CHUNKS, "slopes.mul_(bent)", "slopes", (FUNCTION, "-k", VALUES),
    ),
    Mutant(
        "head: logits of all rows at a time", TARGETS, "rows = self.rows or", "rows = 10**6 or",
        (FUNCTION, "-k", "size_of_the_logits"),
    ),
    Mutant(
        "head: an outer derivative by a value that the inner one takes as given", TARGETS,
        "if value is not None]", "if value is not None and ctx.wants[place]]", (FUNCTION, "-k", TRANSFORMS),
    ),
    Mutant(
        "head: inside of vmap a gradient is that which nobody asked for", TARGETS, "if wants == ctx.had else", "if True else",
        (FUNCTION, "-k", TRANSFORMS),
    ),
    Mutant(
        "head: ranks sum up their own columns alone", CHUNKS,
        'total, chosen, mean = columns.all_reduce(torch.stack([total, chosen, mean.expand_as(chosen)]), "sum")',
        "mean = mean.expand_as(chosen)", (HEADS, "-k", "tied_head and vocab"),
    ),
    Mutant(
        "head: a label is looked for on all ranks", CHUNKS, "own = counted & (local >= 0) & (local < logits.shape[-1])",
        "own = counted", (HEADS, "-k", "tied_head and vocab"),
    ),
    Mutant(
        "head: a soft cap is that of logits which are not scaled", LOGITS, "self._cap, self._scale * self._cap", "self._cap, 1.0",
        (HEADS, "-k", "capped and local"),
    ),
    Mutant(
        "head: logits are not scaled", LOGITS, "        targets.scale = self._scale\n", "", (HEADS, "-k", "granite"),
    ),
    Mutant(
        "head: a loss reads parameters that came after the call", LOGITS, "partial(losses, module.weight, module.bias)",
        "lambda hidden, targets: losses(module.weight, module.bias, hidden, targets)", (HEADS, "-k", "moved and local"),
    ),
    Mutant(
        "head: the gradient of a weight overflows in fp16", CHUNKS, "if compute is torch.float16 else 1.0", "if False else 1.0",
        (HEADS, "-k", "fp16_has_room"),
    ),
    Mutant(
        "head: a target for other rows is taken", LOGITS, "if target.shape != logits.shape[:-1]:", "if False:", (HEADS, "-k", "shifts"),
    ),
    Mutant(
        "waiting: inputs by keyword stay", "transforms/rematerialisation.py", 'if save != "offload":\n            return', 'if kwargs or save != "offload":\n            return',
        (WAITING, "-k", "by_keyword"),
    ),
    Mutant(
        "head: evaluation gets no logits", LOGITS, "(getattr(module, _TRAINS) and torch.is_grad_enabled())", "getattr(module, _TRAINS)",
        (HEADS, "-k", "without_gradients and local"),
    ),
    Mutant(
        "waiting: a tensor that changed in place is not copied again", MEMORY, "place += (_torch.version_of(tensor),)", "place += (0,)",
        (WAITING, "-k", "changed_in_place"),
    ),
    Mutant(
        "waiting: memory that is used again is taken for what was there", MEMORY, " or waiting.storage() is not storage", "",
        (WAITING, "-k", "freed_memory"),
    ),
    Mutant(
        "waiting: a block's input comes back when it is asked for", MEMORY, "if before is not None and", "if False and before is not None and",
        (WAITING, "-k", "one_ahead"),
    ),
    Mutant(
        "waiting: what was sent is kept for good", MEMORY, "weakref.WeakValueDictionary[Any, _Waiting] = weakref.WeakValueDictionary()",
        "dict[Any, _Waiting] = {}", (WAITING, "-k", "one_ahead"),
    ),
    Mutant(
        "filled: the random numbers of the script are those of the fill", "strategies/fsdp_engine.py", "        streams.put_back()\n", "        pass\n",
        (FILLED, "-k", "any_number and 2"),
    ),
    Mutant(
        "filled: each seed draws the same", "strategies/fsdp_engine.py", "streams.reseed(seed)", "streams.reseed(3)", (FILLED, "-k", "seeds_differ"),
    ),
    Mutant(
        "filled: a module that is left out is not seen", "strategies/fsdp_engine.py", "if whole.isnan().any():", "if False:",
        (FILLED, "-k", "mistake and forgetful"),
    ),
]  # fmt: skip
