"""Capture: what a policy samples over many calls, as sequences in which every trained token has its exact context."""
