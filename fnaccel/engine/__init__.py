"""What every strategy shares: the loop over micro-batches, gradients, totals and the updater."""
