"""Tensor parallelism: layers cut over the ranks of one axis, as plain parameters."""

from fnaccel.strategies.tensor.record import tensor as tensor
