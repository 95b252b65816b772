"""Measuring a train step in each scope of `compile`, one fresh process each: what `fnaccel bench` does."""
