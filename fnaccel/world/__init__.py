"""The processes of one job: their ranks, how they join, and their records of each other."""
