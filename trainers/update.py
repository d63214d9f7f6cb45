"""One batch into one update of the weights: advantages, micro-batches, loss, optimizer steps, metrics.

The result does not depend on how rows are packed or spread over ranks: losses are summed over global counts that are
fixed before anything is rejected, and all ranks run the same count of micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.connectors.plugins import load
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Item, Manifest
from headrace.trainers.advantages.advantage import Advantage
from headrace.trainers.backends.backend import Backend
from headrace.trainers.batching import MicroBatch, Row, count_rows, dummy, pack, rows_of, split_updates
from headrace.trainers.losses.aggregation import Denominators, aggregate, mode_named
from headrace.trainers.losses.loss import Loss, LossTerms, Streams, configured
from headrace.trainers.ranks import Ranks
from headrace.trainers.reference import Reference

__all__ = ("Learned", "Learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What training on a batch gave: loss per update averaged, updates applied, metrics of the whole batch."""

    loss: float
    updates: int
    metrics: dict[str, float]


@dataclass(slots=True)
class _Tally:
    """Sums and maxima over this rank's micro-batches, still tensors."""

    loss: list[Tensor] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)

    def add(self, part: Tensor, terms: LossTerms) -> None:
        self.loss.append(part.detach())
        for name, value in terms.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.raise_peaks(terms)

    def raise_peaks(self, terms: LossTerms) -> None:
        for name, value in terms.peaks.items():
            self.peaks[name] = torch.maximum(self.peaks[name], value) if name in self.peaks else value


class Learner:
    """Trains one policy's weights in a backend.

    Raises ConfigurationError for an unknown loss or advantage, options that they do not know, asynchronous data
    without a correction, or sampling that truncates the distribution.
    """

    def __init__(self, config: RunConfig, policy: str, backend: Backend, ranks: Ranks) -> None:
        self._config = config.trainer_of(policy)
        self._backend, self._ranks = backend, ranks
        trainer = self._config
        self._loss: Loss = configured(
            load("headrace.losses", trainer.loss), trainer.loss_options, "trainer.loss_options"
        )
        self._advantage: Advantage = configured(
            load("headrace.advantages", trainer.advantage), trainer.advantage_options, "trainer.advantage_options"
        )
        self._mode = mode_named(trainer.aggregation)
        self._constant = float(config.rollout.max_new_tokens)
        depth = config.policies[policy].depth
        if depth > 0 and not self._loss.corrects_staleness:
            raise ConfigurationError(
                f"policies.{policy}.depth is {depth:g}, so data comes from older policies, but loss {trainer.loss} as "
                "configured does not correct for that; take decoupled_ppo, switch its correction on, or set depth 0"
            )
        if config.rollout.top_p < 1 or config.rollout.top_k > 0:
            raise ConfigurationError(
                "rollout.top_p and rollout.top_k cut the distribution that log-probs are taken from, so that "
                "importance ratios are wrong; train with top_p = 1 and top_k = 0"
            )
        self._reference: Reference | None = None
        if self._loss.needs_reference:
            self._reference = Reference(config.policies[policy].model, ranks.device)

    def train(self, items: Sequence[Item], manifest: Manifest, version: int) -> Learned:
        """Train on this rank's items of a batch; ``version`` is that of the weights before. Collective."""
        config = self._config
        parts = split_updates(
            rows_of(items, self._advantage), config.updates_per_batch, ((m.group, m.use) for m in manifest.members)
        )
        many = config.updates_per_batch * config.epochs > 1
        packed = [self._packed(part) for part in parts]
        counts = [self._counts(part, manifest) for part in parts]
        prox = [[self._fixed(micro) for micro in micros] if many else None for micros in packed]
        tally = _Tally()
        mismatch: dict[str, float] = {}
        norms, applied, losses = [], 0, []
        lr = config.lr * min(1.0, manifest.batch / config.warmup_steps) if config.warmup_steps else config.lr
        for epoch in range(config.epochs):
            for at, micros in enumerate(packed):
                if not counts[at].tokens:
                    continue
                before = len(tally.loss)
                for number, micro in enumerate(micros):
                    fixed, last = prox[at], number == len(micros) - 1
                    new = self._one(micro, fixed[number] if fixed else None, counts[at], tally, last)
                    if not epoch and not at:
                        _compare(new, micro, version, mismatch)
                update = self._backend.step(lr)
                norms.append(update.grad_norm)
                applied += update.applied
                losses.append(sum(float(part) for part in tally.loss[before:]))
        metrics = self._metrics(tally, items, manifest, mismatch)
        metrics["optim/lr"] = lr
        metrics["optim/grad_norm"] = norms[-1] if norms and math.isfinite(norms[-1]) else 0.0
        metrics["optim/skipped"] = float(len(norms) - applied)
        total = self._ranks.add_up({"loss": sum(losses)})["loss"]
        loss = total / max(1, len(losses))
        return Learned(loss=loss if math.isfinite(loss) else 0.0, updates=applied, metrics=metrics)

    def _packed(self, rows: Sequence[Row]) -> list[MicroBatch]:
        """Micro-batches of an update; ranks with fewer than the others add dummies."""
        micros = pack(rows, self._config.micro_batch_tokens)
        most = int(self._ranks.largest({"micros": len(micros)})["micros"])
        return micros + [dummy() for _ in range(most - len(micros))]

    def _counts(self, rows: Sequence[Row], manifest: Manifest) -> Denominators:
        """Global counts of an update: the Manifest's for a whole batch, else added up."""
        tokens, sequences = manifest.tokens, manifest.sequences
        if self._config.updates_per_batch > 1:
            here = self._ranks.add_up(count_rows(rows))
            tokens, sequences = int(here["tokens"]), int(here["sequences"])
        return Denominators(tokens=tokens, sequences=sequences, constant=self._constant)

    def _fixed(self, micro: MicroBatch) -> Tensor:
        return self._backend.logprobs(micro, gradient=False)

    def _one(self, micro: MicroBatch, prox: Tensor | None, counts: Denominators, tally: _Tally, last: bool) -> Tensor:
        """Forward and backward of one micro-batch; returns its new log-probs without gradient."""
        new = self._backend.logprobs(micro, gradient=True)
        micro = micro.to(new.device)
        streams = Streams(
            new=new,
            prox=new.detach() if prox is None else prox,
            behave=micro.behave,
            advantages=micro.advantages,
            mask=micro.mask,
            ref=self._reference.logprobs(micro) if self._reference else None,
            rewards=micro.rewards,
        )
        terms = self._loss(streams)
        part = aggregate(terms.loss, micro.mask, self._mode, counts)
        self._backend.backward(part, last=last)
        tally.add(part, terms)
        return new.detach()

    def _metrics(
        self, tally: _Tally, items: Sequence[Item], manifest: Manifest, mismatch: dict[str, float]
    ) -> dict[str, float]:
        """Figures of the whole batch under the names of the field."""
        local = {f"sum/{name}": float(value) for name, value in tally.sums.items()}
        local |= {name: value for name, value in mismatch.items() if name != "largest"}
        local["tokens"] = float(manifest.tokens * self._config.epochs) if self._ranks.leads else 0.0
        local["items"], local["reward"] = float(len(items)), sum(item.shaped_reward for item in items)
        local["raw"] = sum(item.raw_reward for item in items)
        local["length"] = float(sum(item.length for item in items))
        total = self._ranks.add_up(local)
        tops = {name: float(value) for name, value in tally.peaks.items()}
        tops["mismatch/logprob_abs_max"] = mismatch.get("largest", 0.0)
        tops["seq_len/max"] = float(max((item.length for item in items), default=0))
        top = self._ranks.largest(tops)
        n, tokens = max(1.0, total["items"]), max(1.0, total["tokens"])
        out = {name.removeprefix("sum/"): value / tokens for name, value in total.items() if name.startswith("sum/")}
        square = out.pop("ratio/behave_squared", 0.0)
        out["ess"] = out["ratio/behave"] ** 2 / square if square else 0.0
        out |= {"reward/mean": total["reward"] / n, "reward/raw_mean": total["raw"] / n}
        out["seq_len/mean"] = total["length"] / n
        out["mismatch/logprob_abs_mean"] = total.get("distance", 0.0) / max(1.0, total.get("compared", 0.0))
        ages = [manifest.start_version - m.oldest_version for m in manifest.members if m.oldest_version >= 0] or [0]
        out |= {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}
        out |= top
        return {name: value for name, value in out.items() if math.isfinite(value)}


def _compare(new: Tensor, micro: MicroBatch, version: int, into: dict[str, float]) -> None:
    """Add up |new - behave| over the rows that the present version sampled whole, before any update.

    In a row of several versions a token of the present one saw keys and values of older ones.
    """
    whole = ((micro.versions == version) | ~micro.mask).all(-1, keepdim=True)
    fresh = (micro.mask & whole).to(new.device)
    distance = (new - micro.behave.to(new.device)).abs()[fresh]
    if distance.numel():
        into["distance"] = into.get("distance", 0.0) + float(distance.sum())
        into["compared"] = into.get("compared", 0.0) + distance.numel()
        into["largest"] = max(into.get("largest", 0.0), float(distance.max()))
