"""Estimates of a step: its memory, its collectives and its least time, for any number of ranks."""

from fnaccel.estimate.account import Peak as Peak
from fnaccel.estimate.storages import LiveStorages as LiveStorages
from fnaccel.estimate.training_memory import TrainingEstimate as TrainingEstimate
from fnaccel.estimate.training_memory import training as training
