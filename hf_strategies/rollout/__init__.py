"""Rollouts: engines, rewards, reuse and policy versions."""
