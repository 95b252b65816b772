"""Shared by all strategies: the loop over micro-batches, gradients, totals and the updater."""
