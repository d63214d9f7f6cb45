"""Figures of a batch while it is trained: sums, maxima and losses of micro-batches into metrics of the whole batch.

In: what losses give per micro-batch and rank; out: numbers under the names of the field, the same on every rank and
however the batch was split (docs/losses.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.schemas.records import Item, Manifest
from headrace.trainers.batching import MicroBatch
from headrace.trainers.losses.loss import LossTerms, select
from headrace.trainers.ranks import Ranks

__all__ = ("Tally", "batch_metrics")


@dataclass(slots=True)
class Tally:
    """Over this rank's micro-batches: parts of the loss, sums over tokens and over sequences, maxima; still tensors.

    counts: trained tokens and sequences that were counted (tokens, rows), and sequences left_out before. mismatch:
    |new - behave| over whole fresh sequences.
    """

    loss: list[Tensor] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)
    mismatch: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, part: Tensor, terms: LossTerms, micro: MicroBatch, entropy: Tensor | None = None) -> None:
        """Take what a micro-batch gave; exact entropies [rows, length] take the place of the loss's own estimate."""
        self.loss.append(part.detach())
        gain = select(micro.advantages, micro.mask)
        own = {"advantage/abs_mean": gain.abs().sum(), "advantage/zero_fraction": (micro.mask & (gain == 0)).sum()}
        if entropy is not None:
            own["entropy"] = select(entropy, micro.mask).sum()
        self.sum_up({**terms.sums, **own})
        for name, value in terms.rows.items():
            self.rows[name] = self.rows[name] + value if name in self.rows else value
        for name, value in terms.peaks.items():
            self.peaks[name] = torch.maximum(self.peaks[name], value) if name in self.peaks else value

    def sum_up(self, sums: Mapping[str, Tensor]) -> None:
        """Add sums over tokens."""
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def count(self, micro: MicroBatch) -> None:
        """Count tokens and rows of a micro-batch that is still in host memory, where it costs no synchronisation."""
        self.counts["tokens"] = self.counts.get("tokens", 0.0) + float(micro.mask.sum())
        self.counts["rows"] = self.counts.get("rows", 0.0) + float(micro.mask.any(-1).sum())

    def compare(self, new: Tensor, micro: MicroBatch, version: int) -> None:
        """Add up |new - behave| over the rows that the present version sampled whole, before any update.

        In a row of several versions a token of the present one saw keys and values of older ones.
        """
        whole = ((micro.versions == version) | ~micro.mask).all(-1, keepdim=True)
        fresh = (micro.mask & whole).to(new.device)
        distance = (new - micro.behave.to(new.device)).abs()[fresh]
        if distance.numel():
            into = self.mismatch
            into["distance"] = into.get("distance", 0.0) + float(distance.sum())
            into["compared"] = into.get("compared", 0.0) + distance.numel()
            into["largest"] = max(into.get("largest", 0.0), float(distance.max()))


def batch_metrics(tally: Tally, items: Sequence[Item], manifest: Manifest, ranks: Ranks) -> dict[str, float]:
    """Figures of the whole batch under the names of the field; collective. Those that are not finite are left out."""
    local = {f"sum/{name}": float(value) for name, value in tally.sums.items()}
    local |= {f"row/{name}": float(value) for name, value in tally.rows.items()}
    local |= {f"count/{name}": value for name, value in tally.counts.items()}
    local |= {f"mismatch/{name}": value for name, value in tally.mismatch.items() if name != "largest"}
    local |= {
        "items": float(len(items)),
        "reward": sum(item.shaped_reward for item in items),
        "raw": sum(item.raw_reward for item in items),
        "length": float(sum(item.length for item in items)),
        "alone": float(sum(item.group_count <= 1 for item in items)),
    }
    total = ranks.add_up(local)
    tops = {name: float(value) for name, value in tally.peaks.items()}
    tops["mismatch/logprob_abs_max"] = tally.mismatch.get("largest", 0.0)
    tops["seq_len/max"] = float(max((item.length for item in items), default=0))
    top = ranks.largest(tops)
    if "mismatch/log_ppl_diff_negative_max" in top:
        top["mismatch/log_ppl_diff_min"] = -top.pop("mismatch/log_ppl_diff_negative_max")
    out = _means(total, "sum/", total.get("count/tokens", 0.0)) | _means(total, "row/", total.get("count/rows", 0.0))
    out |= _derived(out)
    n = max(1.0, total["items"])
    out |= {"reward/mean": total["reward"] / n, "reward/raw_mean": total["raw"] / n}
    out["seq_len/mean"], out["advantage/singletons"] = total["length"] / n, total["alone"]
    out["batch/left_out"] = total.get("count/left_out", 0.0)
    compared = max(1.0, total.get("mismatch/compared", 0.0))
    out["mismatch/logprob_abs_mean"] = total.get("mismatch/distance", 0.0) / compared
    ages = [manifest.start_version - m.oldest_version for m in manifest.members if m.oldest_version >= 0] or [0]
    out |= {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}
    out |= top
    return {name: value for name, value in out.items() if math.isfinite(value)}


def _means(total: Mapping[str, float], kind: str, count: float) -> dict[str, float]:
    """The sums of one kind divided by their count."""
    return {name.removeprefix(kind): x / max(1.0, count) for name, x in total.items() if name.startswith(kind)}


def _derived(means: dict[str, float]) -> dict[str, float]:
    """Effective sample size, chi-squared, explained variance, from means of squares, which are taken out."""
    out = {}
    square = means.pop("ratio/behave_squared", 0.0)
    out["ess"] = means.get("ratio/behave", 0.0) ** 2 / square if square else 0.0
    out["chi2"] = square - 1 if square else 0.0
    for name in ("mismatch/ratio_squared", "mismatch/sequence_ratio_squared"):
        if name in means:
            out[name.replace("ratio_squared", "chi2")] = means.pop(name) - 1
    if "critic/return_squared" in means:
        spread = means.pop("critic/return_squared") - means.get("critic/return", 0.0) ** 2
        error = means.pop("critic/error_squared")
        out["critic/explained_variance"] = 1 - error / spread if spread > 1e-12 else 0.0
    return out
