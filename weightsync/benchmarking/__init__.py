"""What `weightsync bench` does: every transport against one plain copy, on one model's shapes, in one run."""
