"""Faults of checkpoints on purpose: one file per bar, each with the sabotaged twin that it must catch."""
