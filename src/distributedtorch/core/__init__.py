"""Words and contracts every part shares; knows torch only."""
