"""Measurements: `python -m benchmarks.NAME [--quick] [--json FILE]` prints a table and writes one flat JSON object."""
