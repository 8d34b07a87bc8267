"""Move policy weights from training workers into inference engines while an RL job runs."""

__version__ = "0.1.0"
