"""A node of a federation: one client's own machine."""
