"""One experiment file from start to end: by `fedspan run`, by plain torch, by pfl-research."""
