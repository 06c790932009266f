"""Several machines: chunks of a round on the actors of a Ray cluster. Ray is imported here alone, when asked for."""
