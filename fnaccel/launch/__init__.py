"""Starting processes for `fnaccel launch`, and the environment variables for `fa.start`."""
