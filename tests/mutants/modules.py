"""Deliberate bugs in the care for modules: their modes, their memory, their hooks and their buffers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TRAPS = "tests/parity/test_traps.py"
MODES = "tests/robust/test_modes.py"

MUTANTS = [
    Mutant(
        "a frozen batch norm is thawed by an evaluation", "models/module_modes.py",
        'vars(module)["training"] = training', 'vars(module)["training"] = True',
        (TRAPS, "-k", "evaluation and sgd-local-eager"),
    ),
    Mutant(
        "modes are not put back after a look that raises", "models/module_modes.py",
        "        try:\n            yield\n        finally:\n            self._set(evaluating=before)",
        "        yield\n        self._set(evaluating=before)", (MODES, "-k", "raises-local"),
    ),
    Mutant(
        "a parameter with gaps takes the fused kernel", "optim/fused.py", "_FUSED[name] if dense else _PLAIN[name]",
        "_FUSED[name]", (TRAPS, "-k", "gaps and local-eager"),
    ),
    Mutant(
        "gradients of numbers are left apart", "strategies/layout.py", "if not shape or 0 in shape:", "if 0 in shape:",
        (TRAPS, "-k", "scalars and fsdp-eager"),
    ),
]  # fmt: skip
