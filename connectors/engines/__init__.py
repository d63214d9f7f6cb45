"""Engines that sample tokens from a policy, behind one Protocol (``engine.py``)."""
