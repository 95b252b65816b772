"""Carriers: pure functions from a job to the commands and texts that start it elsewhere. One file each."""
