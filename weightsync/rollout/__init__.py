"""The receiving side: what a rollout worker does with the weights that a checkpoint engine brings."""
