"""Pipelines: ranks run parts of the model one after the other, on micro-batch after micro-batch."""

from fnaccel.strategies.pipeline import building as _building
from fnaccel.strategies.pipeline.record import pipeline as pipeline

_INTERPRETER = _building  # importing it registers it
