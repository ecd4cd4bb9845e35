"""Metrics, progress and completions for people."""
