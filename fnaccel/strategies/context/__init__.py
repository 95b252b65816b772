"""Context parallelism: each rank has some tokens of each sequence, and attention reaches those of others."""

from fnaccel.strategies.context.record import Context as Context
from fnaccel.strategies.context.record import context as context
