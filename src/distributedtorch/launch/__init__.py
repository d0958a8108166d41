"""Starting processes, joining a world that is there, ending all of it together."""
