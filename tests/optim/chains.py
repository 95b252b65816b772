"""Optimizers from parts, each with the same update written by hand, and the leaves on which both are compared."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import torch

import fnaccel as fa
from fnaccel.models.parameter import Leaf
from fnaccel.optim import fused
from fnaccel.optim.operations import FAST, PURE
from fnaccel.optim.rules import UpdateInfo, placed, run_parts

parts = fa.optim
SHAPES = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (5, 4), "zero": (3,)}


def leaf(shape, k):
    return torch.from_numpy(np.sin(np.arange(math.prod(shape)) * (0.7 + 0.1 * k) + k).reshape(shape))


def first_params():
    return [leaf(shape, i) * (name != "zero") for i, (name, shape) in enumerate(SHAPES.items())]


def grads_of(step):
    return [leaf(shape, 3 * i + 11 * step) * (1 + i) for i, shape in enumerate(SHAPES.values())]


def leaves_of(params):
    return [Leaf(name, param, param, param) for name, param in zip(SHAPES, params, strict=True)]


def run(chain, rate, ops=PURE, updates=5, missing=()):
    """Parameters and slots after some updates by the rules of a chain."""
    params = [param.clone() for param in first_params()]
    every = [placed(part, leaves_of(params)) for part in chain]
    slots = [
        each.part.init([params[i] for i in (range(len(params)) if each.places is None else each.places)])
        for each in every
    ]
    for step in range(updates):
        grads = [None if i in missing and step == 2 else grad for i, grad in enumerate(grads_of(step))]
        info = UpdateInfo(step + 1, rate(step) if callable(rate) else rate)
        params, slots = run_parts(ops, every, grads, slots, params, info)
    return params, slots


def unfused():
    """In the body chains don't take the fused kernel that computes the same."""
    return mock.patch.object(fused, "fused_of", return_value=None)


def is_weight(name, parameter):
    return parameter.ndim > 1


LAMB = (
    parts.clip_norm(0.5), parts.add_decayed_weights(1e-2, mask="*weight"), parts.scale_by_adam(eps=1e-6),
    parts.trust_ratio(),
)  # fmt: skip
LARS = (
    parts.add_decayed_weights(1e-2, mask=is_weight), parts.masked(parts.trust_ratio(coefficient=1e-2), is_weight),
    parts.trace(0.9),
)  # fmt: skip
LION = (parts.scale_by_lion(), parts.add_decayed_weights(0.1))
AGC = (parts.adaptive_clip(0.05), parts.trace(0.9, nesterov=True))
RMS = (parts.centralize(), parts.scale_by_rms(decay=0.9), parts.trace(0.9), parts.lookahead(every=2))


def adam(m, v, grad, step, eps):
    m.mul_(0.9).add_(0.1 * grad)
    v.mul_(0.999).add_(0.001 * grad * grad)
    return (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + eps)


def ratio(param, move, coefficient=1.0):
    a, b = param.norm(), move.norm()
    return 1.0 if a == 0 or b == 0 else coefficient * a / b


class Hand:
    """Optimizers as one would write them: a loop over parameters with their slots."""

    def __init__(self, params):
        self.params = params
        self.a, self.b = ([torch.zeros_like(p) for p in params] for _ in range(2))
        self.slow = [p.clone() for p in params]

    def lamb(self, grads, step, rate):
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for p, g, m, v in zip(self.params, grads, self.a, self.b, strict=True):
            g = g * min(1.0, float(0.5 / norm)) + (1e-2 * p if p.ndim > 1 else 0)
            u = adam(m, v, g, step, 1e-6)
            p -= rate * ratio(p, u) * u

    def lars(self, grads, step, rate):
        for p, g, m in zip(self.params, grads, self.a, strict=True):
            if p.ndim > 1:
                g = g + 1e-2 * p
                g = g * ratio(p, g, 1e-2)
            p -= rate * m.mul_(0.9).add_(g)

    def lion(self, grads, step, rate):
        for p, g, m in zip(self.params, grads, self.a, strict=True):
            u = (0.9 * m + 0.1 * g).sign() + 0.1 * p
            m.mul_(0.99).add_(0.01 * g)
            p -= rate * u

    def agc(self, grads, step, rate):
        for p, g, m in zip(self.params, grads, self.a, strict=True):
            rows_p, rows_g = (x if x.ndim > 1 else x[None] for x in (p, g))
            most = 0.05 * rows_p.norm(dim=1, keepdim=True).clamp(min=1e-3)
            norm = rows_g.norm(dim=1, keepdim=True)
            g = torch.where(norm > most, rows_g * most / norm, rows_g).reshape(g.shape)
            m.mul_(0.9).add_(g)
            p -= rate * (g + 0.9 * m)

    def rms(self, grads, step, rate):
        for i, (p, g, v, m) in enumerate(zip(self.params, grads, self.a, self.b, strict=True)):
            g = g - g.mean(dim=1, keepdim=True) if g.ndim > 1 else g
            v.mul_(0.9).add_(0.1 * g * g)
            p -= rate * m.mul_(0.9).add_(g / (v.sqrt() + 1e-8))
            if step % 2 == 0:
                self.slow[i] += 0.5 * (p - self.slow[i])
                p.copy_(self.slow[i])


CHAINS = {
    "lamb": (LAMB, Hand.lamb), "lars": (LARS, Hand.lars), "lion": (LION, Hand.lion), "agc": (AGC, Hand.agc),
    "rms": (RMS, Hand.rms),
}  # fmt: skip
SETS = {"in place": FAST, "as a function": PURE}
