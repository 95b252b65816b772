"""`fnaccel test`: runs collectives, strategies, checkpoints and the machines themselves, and judges each."""
