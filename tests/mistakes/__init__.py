"""Scripts as people write them, mistakes included: each gives the result of one process, or is refused in words."""
