"""Workflows: how an episode is played, one a file, each a plug-in of the group ``headrace.workflows``."""
