"""Deliberate bugs of tensor parallelism. Each would train wrongly without an error, or cost collectives."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TENSOR = "tests/strategies/tensor/test_parity.py"
ERRORS = "tests/strategies/tensor/test_errors.py"
PROBE = "tests/program/test_probe.py"
OPTIONS = "tests/strategies/tensor/test_options.py"

MUTANTS = [
    Mutant(
        "column layers keep their own gradients", "strategies/tensor/collectives.py",
        "return all_reduce(grad, ctx.group), None", "return grad, None", (TENSOR, "-k", "parity and four"),
    ),
    Mutant(
        "each column layer copies its input", "strategies/tensor/region.py",
        "if entered is None or self._source is not value:", "if True:", (TENSOR, "-k", "apart"),
    ),
    Mutant(
        "packed matrices are cut as one", "strategies/tensor/styles.py",
        "    if cut.matrices == 1:\n        chunk", "    if True:\n        chunk", (TENSOR, "-k", "parity and four"),
    ),
    Mutant(
        "norms on a part of the sequence keep their own gradients", "strategies/partial_gradients.py",
        "            dist.all_reduce(flat, group=group)\n", "", (TENSOR, "-k", "parity and sequence and ddp and fsdp"),
    ),
    Mutant(
        "first gradients are not compared", "strategies/partial_gradients.py", "    if names:\n", "    if False:\n",
        (ERRORS, "-k", "different_ones"),
    ),
    Mutant(
        "gradients of a whole model's copies count twice", "strategies/layout.py", "            copies //= mesh.shown.size(number)",
        "            copies = 1", (TENSOR, "-k", "parity and hsdp"),
    ),
    Mutant(
        "hooks of ddp average over all ranks", "strategies/ddp_hooks.py",
        "register_comm_hook(wrapped.process_group, plain", "register_comm_hook(None, plain",
        (TENSOR, "-k", "parity and bf16 and sent"),
    ),
    Mutant(
        "ranks drop the same features between layers", "strategies/tensor/region.py",
        "reseed(fold(number, self._rank, 0, 0))", "reseed(fold(number, 0, 0, 0))",
        (ERRORS, "-k", "random_numbers"),
    ),
    Mutant(
        "a recomputed block leaves its random numbers to the next one", "strategies/tensor/styles.py",
        "        except BaseException:\n            region.end()", "        except BaseException:\n            pass",
        (OPTIONS, "-k", "drop_the_same"),
    ),
    Mutant(
        "a lent model reads other rows on each of its ranks", "program/lent_models.py", "if rows_shared_by % parts:", "if False:",
        (OPTIONS, "-k", "reads_the_same_rows"),
    ),
    Mutant(
        "the probe accepts any loss", "program/probe.py", "if not each.difference <= limit", "if False", (PROBE, "-k", "wrongly"),
    ),
]  # fmt: skip
