"""Receiving into vLLM."""
