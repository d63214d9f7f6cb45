"""Datasets of prompts: JSONL, Parquet, Hugging Face folders; every row is checked when the dataset is opened."""
