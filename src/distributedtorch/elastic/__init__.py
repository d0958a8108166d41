"""Who is there and what they are doing: the watch that names a missing rank."""
