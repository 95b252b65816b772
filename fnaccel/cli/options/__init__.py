"""The options of each command. Nothing here imports PyTorch: `--help` and shell completion are quick."""

COMMANDS = {
    "launch": "run a script as one process per accelerator, on one machine or several",
    "config": "ask for a recipe, import one from another tool, show, check and update it",
    "test": "check this machine, or several: cards, ports, collectives, a training, a checkpoint",
    "inspect": "the contents of a checkpoint, and whether its files are intact",
    "convert": "a checkpoint of one tool as that of another",
    "plan": "the plan of a train step, and a rank's memory and collectives, for any number of ranks",
    "estimate": "the memory of a model, of training it on any number of ranks, and of inference",
    "trace": "the shares of compute, communication and waiting in a profile, rank by rank",
    "report": "an HTML page about one or several runs, from their logs",
    "completion": "a script that completes commands and options in bash, zsh or tcsh",
    "env": "versions, devices and variables that matter, to put into a bug report",
}
