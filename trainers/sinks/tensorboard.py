"""Metrics as TensorBoard event files in the run folder: ``tensorboard --logdir runs``."""

from collections.abc import Mapping

from headrace.trainers.sinks.sink import RunInfo, required

__all__ = ("TensorBoard",)


class TensorBoard:
    """Scalars by version in ``<run folder>/tensorboard/<policy>``, flushed with every version."""

    package = "tensorboard"

    def __init__(self, info: RunInfo, *, folder: str = "") -> None:
        required("tensorboard", "tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder or str(info.folder / "tensorboard" / info.policy))
        if info.settings:
            text = "\n".join(f"    {key} = {value}" for key, value in sorted(info.settings.items()))
            self._writer.add_text("settings", text, 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``Sink``."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See ``Sink``."""
        self._writer.close()
