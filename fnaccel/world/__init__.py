"""The processes of one job: who they are, how they join, what each knows of the others."""
