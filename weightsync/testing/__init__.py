"""Helpers for tests of users and plugin authors: tiny models."""
