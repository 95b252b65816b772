"""Starting processes: what `fnaccel launch` does, and the variables it sets for `fa.start`."""
