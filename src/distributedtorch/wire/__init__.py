"""How bytes travel: one file per kind of code."""
