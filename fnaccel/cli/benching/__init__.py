"""`fnaccel bench`: measures a train step in each scope of `compile`, with a fresh process for each scope."""
