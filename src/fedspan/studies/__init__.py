"""What is found out with runs: diagnosis, targets, the papers' tables and theory."""
