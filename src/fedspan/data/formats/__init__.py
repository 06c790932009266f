"""Readers of file formats; files are untrusted."""
