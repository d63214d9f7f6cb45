"""Advantage estimators: pure functions of a group's rewards, one a file, loaded by entry point."""
