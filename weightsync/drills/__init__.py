"""Drills: jobs that put a small model through what a cluster does to a large one, and look at the outcome."""
