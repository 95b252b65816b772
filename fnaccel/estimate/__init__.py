"""Estimates of a step: its memory, its collectives and its least time, for any number of ranks."""

from fnaccel.estimate.account import Peak as Peak
from fnaccel.estimate.fitting import Choice as Choice
from fnaccel.estimate.fitting import cheapest as cheapest
from fnaccel.estimate.fitting import choices as choices
from fnaccel.estimate.generation import InferenceEstimate as InferenceEstimate
from fnaccel.estimate.generation import inference as inference
from fnaccel.estimate.model_names import NamedModel as NamedModel
from fnaccel.estimate.model_names import find_model as find_model
from fnaccel.estimate.rates import LeastTime as LeastTime
from fnaccel.estimate.rates import Rates as Rates
from fnaccel.estimate.rates import least_time as least_time
from fnaccel.estimate.storages import LiveStorages as LiveStorages
from fnaccel.estimate.training_memory import TrainingEstimate as TrainingEstimate
from fnaccel.estimate.training_memory import training as training
from fnaccel.estimate.work import Work as Work
