"""Rewards: what a completion is worth, one a file, each a plug-in of the group ``headrace.rewards``."""
