"""Compiled code of a train step from a process beside it, so that the first loss does not wait."""
