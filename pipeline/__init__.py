"""The data path: prompts to tasks to trajectories to groups to batches, and deltas to workers."""
