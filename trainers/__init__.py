"""Trainers: batches in, steps and weight deltas out. They meet the pipeline only in topics and the object store."""
