"""Schedules of the learning rate: functions of the number of updates, without state."""

from fnaccel.optim.schedules.shapes import Rate as Rate
from fnaccel.optim.schedules.shapes import Schedule as Schedule
from fnaccel.optim.schedules.shapes import as_schedule as as_schedule
from fnaccel.optim.schedules.shapes import constant as constant
from fnaccel.optim.schedules.shapes import cosine as cosine
from fnaccel.optim.schedules.shapes import ema_warmup as ema_warmup
from fnaccel.optim.schedules.shapes import inverse_sqrt as inverse_sqrt
from fnaccel.optim.schedules.shapes import joined as joined
from fnaccel.optim.schedules.shapes import linear as linear
from fnaccel.optim.schedules.shapes import one_cycle as one_cycle
from fnaccel.optim.schedules.shapes import piecewise as piecewise
from fnaccel.optim.schedules.shapes import warmup_constant as warmup_constant
from fnaccel.optim.schedules.shapes import warmup_cosine as warmup_cosine
from fnaccel.optim.schedules.shapes import warmup_linear as warmup_linear
from fnaccel.optim.schedules.shapes import warmup_stable_decay as warmup_stable_decay
from fnaccel.optim.schedules.torch_scheduler import from_torch_scheduler as from_torch_scheduler
