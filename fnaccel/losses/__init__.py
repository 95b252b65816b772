"""Losses of language models, whose logits are never whole."""

from fnaccel.losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from fnaccel.losses.linear_cross_entropy import log_probabilities as log_probabilities
