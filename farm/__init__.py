"""Rollout Farm: tasks in, sealed trajectory shards out."""

__version__ = "0.1.0"
