"""Benchmarks: the workloads, with the floor and the limit measured in the same run."""
