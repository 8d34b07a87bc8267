"""One refit: its steps, what is cleaned up after a failure, and who is left out where the others go on."""

from weightsync.lifecycle.held import HeldRefit
from weightsync.lifecycle.plan import RefitPlan
from weightsync.lifecycle.refit import Refit

__all__ = ["HeldRefit", "Refit", "RefitPlan"]
