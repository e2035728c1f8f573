"""The command `txmq-spark`: the arguments of each job, and what it prints."""
