"""Other projects on the same workloads, each by its documented interface, in an environment of its own."""
