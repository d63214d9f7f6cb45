"""Environments of multi-turn episodes, each a plug-in of the group ``headrace.environments``."""
