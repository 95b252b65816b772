"""The kinds of program that a user of JAX writes, each beside the same in plain PyTorch on one process.

A program takes a strategy, a transform of its step, and a folder. It returns losses (and other numbers that it reads) and
whole parameters. Its loop by hand returns the same. Programs use public names only.
"""

from __future__ import annotations

from tests.parity.programs import derivatives, states, steps, updates

PROGRAMS = {
    "loop": (states.loop, states.loop_by_hand),
    "rates": (updates.rates, updates.rates_by_hand),
    "maml": (derivatives.maml, derivatives.maml_by_hand),
    "hypergradients": (updates.hypergradients, updates.hypergradients_by_hand),
    "private": (derivatives.private, derivatives.private_by_hand),
    "variance": (derivatives.variance, derivatives.variance_by_hand),
    "lamb": (steps.lamb, steps.lamb_by_hand),
    "own-transform": (states.own_transform, states.own_transform_by_hand),
    "arithmetic": (states.arithmetic, states.arithmetic_by_hand),
    "aux": (derivatives.with_aux, derivatives.with_aux_by_hand),
    "gan": (states.gan, states.gan_by_hand),
    "hessian": (derivatives.hessian, derivatives.hessian_by_hand),
    "gauss-newton": (derivatives.gauss_newton, derivatives.gauss_newton_by_hand),
    "sharpness": (derivatives.sharpness, derivatives.sharpness_by_hand),
    "one-graph": (updates.one_graph, updates.one_graph_by_hand),
    "learned-rate": (updates.learned_rate, updates.learned_rate_by_hand),
    "layout": (steps.layout, steps.layout_by_hand),
    "keys": (steps.keys, steps.keys_by_hand),
    "partial-restore": (states.partial_restore, states.partial_restore_by_hand),
    "extras": (steps.extras, steps.extras_by_hand),
}
