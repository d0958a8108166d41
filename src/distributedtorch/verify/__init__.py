"""Measuring that a plan gives the same result as one process, on the user's own script."""
