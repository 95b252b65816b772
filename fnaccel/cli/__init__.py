"""The command line: one file a command, and `main`, which finds it."""
