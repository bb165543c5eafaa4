"""Training, evaluation and sweeps: real data, one command, nothing lost."""
