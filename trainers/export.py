"""The final model as a Hugging Face folder: the published bf16 weights beside the original's config and tokenizer."""

import json
import shutil
from pathlib import Path

from headrace.connectors.checkpoint_file import write_checkpoint
from headrace.schemas.delta_layout import Layout
from headrace.trainers.backends.backend import Weights

__all__ = ("export_model",)


def export_model(weights: Weights, source: Path, target: Path) -> None:
    """Write ``target`` whole or not at all; ``source`` is the folder that training began from.

    A target of an earlier attempt is replaced.
    """
    beside = target.parent / f".{target.name}.part"
    shutil.rmtree(beside, ignore_errors=True)
    layout = Layout.of(weights, dict.fromkeys(weights, "bfloat16"))
    write_checkpoint(beside, layout, weights, source, {})
    config = json.loads((source / "config.json").read_text("utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
