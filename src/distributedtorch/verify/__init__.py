"""Measuring that a plan gives the same result as one process, on the user's own script.

The map of the package:
  record    what a run writes down; sketch: in how few numbers; still: chance taken out of the model
  runs      what it wrote, read back
  compare   how much runs differ, and how much of it is rounding
  reasons   the first difference and what is likely behind it
  verdict   the outcome
  measure   the three runs: `dt.verify` and `dtorch verify`
"""
