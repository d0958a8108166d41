"""Parameter servers: what a shard holds, when a push may be applied, and the channel between workers and servers."""
