"""What log-probs of chosen tokens cost without the full logits, beside the naive way: project, log-softmax, gather.

Hidden 896, vocabulary 151,936 (Qwen2.5-0.5B), 4,096 tokens, float32, forward and backward to hidden states and weight.
Each measurement is a process of its own: peak memory is the kernel's high-water mark (VmHWM) during the step less what
was resident before it, weights and inputs included in neither; ways alternate. `--quick`: 32,768 words, 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.form import Figure, main, median

HIDDEN, VOCABULARY, TOKENS = 896, 151_936, 4_096
WAYS = ("naive", "lean")


def resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024


def step(way: str, vocabulary: int, tokens: int, keep_mb: int) -> dict[str, float]:
    """One forward and backward after a small one that warms up; seconds and bytes above the baseline."""
    import torch

    from headrace.trainers.backends.token_logprobs import HeadShape, token_logprobs

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator).mul_(0.05).requires_grad_()
    hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    factors = torch.randn(tokens, generator=generator)
    shape = HeadShape(keep_bytes=keep_mb << 20)

    def loss(n: int, words: int) -> torch.Tensor:
        if way == "naive":
            logits = torch.nn.functional.linear(hidden[:n], weight[:words])
            chosen = logits.log_softmax(-1).gather(1, targets[:n, None].clamp(max=words - 1))[:, 0]
        else:
            chosen, _ = token_logprobs(
                hidden[:n], weight[:words], targets[:n].clamp(max=words - 1), torch.ones(n), shape=shape
            )
        return (chosen * factors[:n]).sum()

    loss(64, 1024).backward()  # type: ignore[no-untyped-call]
    weight.grad = hidden.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    cpu, began = time.process_time(), time.perf_counter()
    loss(tokens, vocabulary).backward()  # type: ignore[no-untyped-call]
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert weight.grad is not None and hidden.grad is not None
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "bytes": resident("VmHWM") - before,
        "check": float(hidden.grad.double().norm()) + float(weight.grad.double().norm()),
    }


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """Alternate the two ways, and compare medians."""
    size = (32_768, 1_024) if given.quick else (VOCABULARY, TOKENS)
    rounds = 1 if given.quick else given.rounds
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            command = [sys.executable, "-m", "benchmarks.logprobs", "--step", way, str(size[0]), str(size[1])]
            command.append(str(min(given.keep_mb, 32) if given.quick else given.keep_mb))
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True)
            found[way].append(json.loads(done.stdout))
            print(f"{way}: {found[way][-1]}", file=sys.stderr)
    a, b = (found[way][0]["check"] for way in WAYS)
    if abs(a - b) > 1e-4 * abs(a):
        raise SystemExit(f"the two ways have other gradients: norms {a} and {b}")
    middle = {way: {key: median(run[key] for run in found[way]) for key in found[way][0]} for way in WAYS}
    naive, lean = middle["naive"], middle["lean"]
    anchor = f"{size[1]} tokens, {size[0]} words, hidden {HIDDEN}, naive"
    bars = (None, None) if given.quick else (0.35, 1.1)  # a small problem is mostly the weight's gradient
    yield Figure("memory_ratio", lean["bytes"] / naive["bytes"], target=bars[0], at_least=False, anchor=anchor)
    yield Figure("time_ratio", lean["seconds"] / naive["seconds"], target=bars[1], at_least=False, anchor=anchor)
    yield Figure("cpu_ratio", lean["cpu_seconds"] / naive["cpu_seconds"], anchor=anchor)
    for way in WAYS:
        yield Figure(f"{way}_gib", middle[way]["bytes"] / 2**30, "GiB")
        yield Figure(f"{way}_seconds", middle[way]["seconds"], "s")


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each way")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--keep-mb", type=int, default=1024, help="logits kept for backward (trainer.logits_memory_mb)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        print(json.dumps(step(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))))
    else:
        main(__doc__, measure, options)
