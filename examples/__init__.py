"""Programs that use weightsync from end to end."""
