"""Files that survive a crash: atomic writes, locks, checkpoints, the client store."""
