"""Measurements of the product, each against a limit taken in the same run."""
