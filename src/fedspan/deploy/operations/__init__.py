"""Keys, processes and the proxy of a federation."""
