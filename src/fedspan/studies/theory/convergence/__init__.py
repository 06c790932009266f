"""Theorem 1 of the pFL-MF paper: where it fails as printed, the corrected bound, and runs against both."""
