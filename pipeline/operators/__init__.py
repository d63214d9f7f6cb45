"""Data algorithms, one a file: pure functions of records and their state, loaded by entry point."""
