"""The options of each command. Nothing here imports PyTorch: `--help` and shell completion are quick."""

COMMANDS = {
    "launch": "run a script as one process per accelerator, on one machine or several",
    "config": "show each value of a recipe and its source, check a file, write one for this machine",
    "test": "check this machine, or several: collectives, strategies, checkpoints, ports, clocks",
    "inspect": "the contents of a checkpoint, and whether its files are intact",
    "convert": "a checkpoint of one tool as that of another",
    "plan": "what a train step would do, and a rank's memory and collectives, for any number of ranks",
    "bench": "the cost and gain of each scope of fa.compile on your loss function",
    "trace": "what the steps of a profile spent their time on, rank by rank",
    "report": "an HTML page about one or several runs, from their logs",
    "completion": "a script that completes commands and options in bash, zsh or tcsh",
    "env": "versions, devices and variables that matter, to put into a bug report",
}
