"""The command line: one file per command, and `main`, which runs the command."""
