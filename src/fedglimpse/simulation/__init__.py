"""The simulated world: local training, reports, evaluation, rounds."""
