"""Environments that episodes step through: reset, step, close."""
