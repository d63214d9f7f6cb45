"""Reward functions, one a file, loaded by entry point."""
