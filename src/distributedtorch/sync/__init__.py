"""How replicas agree: one file per published method."""
