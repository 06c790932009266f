"""Where examples come from: known sets, files, one client's own file."""
