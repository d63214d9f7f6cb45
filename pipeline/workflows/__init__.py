"""Workflows: how one task becomes a trajectory (roles, turns, reward assignment)."""
