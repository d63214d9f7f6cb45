"""headrace: a streaming data pipeline for RL post-training of language models.

Prompts, trajectories and batches flow through Kafka topics; trainers publish weight deltas to an object store;
rollout workers poll them. The four folders of the package are the four layers of that path: ``schemas`` (what
travels), ``connectors`` (outside systems), ``pipeline`` (the data path) and ``trainers`` (weights from batches).
"""

__all__ = ("__version__",)

__version__ = "0.1.0"
