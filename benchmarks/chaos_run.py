"""A real run for the chaos benchmark: its model, data and configuration, its launcher, its broker, its processes.

In: a folder, a kind of broker, a size; out: processes that may be killed by name, the number of steps done, and the
proofs of `headrace verify`. Apache Kafka, which no launcher supervises, is started again here as soon as it is dead.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from headrace.connectors.kafka_node import KafkaNode, free_port

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"{i // 10}{chr(97 + i % 10)}" for i in range(60))]
"""As many as the scripted engine samples from; six digits, each in ten spellings that read alike."""
HEADRACE = str(Path(sys.executable).with_name("headrace"))
ROOT = Path(__file__).resolve().parents[1]
PROMPTS = 600
WORKERS = 2
GROUP_SIZE, BATCH_GROUPS = 4, 4


def make_model(folder: str) -> None:
    """Write a random Qwen3 of 20,000 parameters whose tokenizer reads every token as its digit."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[0-9][a-z]"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("[a-z ]"), ""), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=64, max_position_embeddings=128, tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_data(file: Path) -> None:
    """Write the prompts: a few tokens each, one digit to be guessed."""
    r = random.Random(0)
    rows = [{"prompt": "".join(r.choices(WORDS[4:], k=r.randint(2, 6))), "answer": str(n % 6)} for n in range(PROMPTS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def configuration(folder: Path, steps: int, bootstrap: str, patience_seconds: float) -> dict[str, Any]:
    """The run: endless prompts, filters, two scripted workers, a plain torch trainer; it ends after `steps` versions.

    Back-off between deaths stays short (they are counted in a window of 4 s) and no number of deaths ends the run.
    """
    return {
        "run": {
            "id": "chaos", "folder": str(folder), "group_partitions": 4, "inboxes": 8, "lanes": 4,
            "max_restarts": 1000, "restart_window_seconds": 4.0, "patience_seconds": patience_seconds,
        },
        "kafka": {"bootstrap": bootstrap},
        "policies": {"main": {"model": str(folder / "model"), "depth": 1.0}},
        "streams": {"main": {"dataset": str(folder / "prompts.jsonl"), "group_size": GROUP_SIZE}},
        "operators": [{"type": "dynamic_sampling"}],
        "rollout": {
            "engine": "scripted", "workers": WORKERS, "slots": 8, "max_new_tokens": 8, "task_deadline_seconds": 30.0,
            "options": {"step_seconds": 0.02, "mean_length": 2.0, "sigma": 0.4},
        },
        "trainer": {
            "backend": "torch", "precision": "fp32", "batch_groups": BATCH_GROUPS, "max_steps": steps,
            "checkpoint_every": 2, "full_every": 20, "lr": 1e-4,
        },
    }  # fmt: skip


class ChaosRun:
    """One run with its launcher; a context manager that leaves no process behind."""

    def __init__(
        self, folder: Path, broker: str, steps: int, libs: Path | None, *, patience_seconds: float = 600.0
    ) -> None:
        self.folder = folder
        self.path = folder / "chaos"
        self.local = broker == "local"
        self.steps = steps
        self._patience = patience_seconds
        self._libs = libs
        self._node: KafkaNode | None = None
        self._keeper = threading.Thread(target=self._keep_broker, name="broker-keeper", daemon=True)
        self._over = threading.Event()
        self._port = 0 if self.local else free_port()

    def __enter__(self) -> ChaosRun:
        make = "import sys; from benchmarks.chaos_run import make_model; make_model(sys.argv[1])"  # torch stays there
        subprocess.run(
            [sys.executable, "-c", make, str(self.folder / "model")], cwd=ROOT, check=True, capture_output=True
        )
        make_data(self.folder / "prompts.jsonl")
        self.bootstrap = "" if self.local else f"127.0.0.1:{self._port}"
        if not self.local:
            self._start_node()
            self._keeper.start()
        file = self.folder / "run.json"
        file.write_text(json.dumps(configuration(self.folder, self.steps, self.bootstrap, self._patience)))
        command = [HEADRACE, "run", "@", str(file)]
        with (self.folder / "launcher.log").open("wb") as log:
            self.launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_launcher()
        self._over.set()
        if self._node is not None:
            self._keeper.join()
            self._node.stop()

    def _start_node(self) -> None:
        assert self._libs is not None, "Apache Kafka needs --libs or HEADRACE_KAFKA_LIBS"
        self._node = KafkaNode(self._libs, self.folder / "kafka", self._port)
        self._node.wait_ready()

    def _keep_broker(self) -> None:
        """Start Apache Kafka again whenever it has died, as its supervisor would."""
        while not self._over.wait(0.05):
            if self._node is not None and self._node.process.poll() is not None:
                self._node = KafkaNode(self._libs or Path(), self.folder / "kafka", self._port)

    # processes

    def parts(self) -> list[str]:
        """Names of the processes that may be killed."""
        return ["broker", "operators-0", "source-main", "trainer-main", *(f"rollout-{i}" for i in range(WORKERS))]

    def pid_of(self, part: str) -> int:
        """The process of a part, 0 when it does not run at present."""
        if part == "broker" and not self.local:
            node = self._node
            return node.process.pid if node is not None and node.process.poll() is None else 0
        mark = str(self.path / "broker") if part == "broker" else str(self.path / "config.json")
        name = "headrace.connectors.broker" if part == "broker" else part
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = file.read_bytes().split(b"\0")
            except OSError:
                continue
            if mark.encode() in words and name.encode() in words:
                return int(file.parent.name)
        return 0

    def kill(self, part: str) -> bool:
        """Kill a part with -9; False when it does not run."""
        pid = self.pid_of(part)
        if not pid:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    # progress and outcome

    def running(self) -> bool:
        """Whether the launcher is still there."""
        return self.launcher.poll() is None

    def steps_done(self) -> int:
        """Versions published so far, as the launcher has noted them."""
        try:
            return (self.path / "metrics.jsonl").read_bytes().count(b'"kind": "step"')
        except OSError:
            return 0

    def finished(self, seconds: float) -> bool:
        """Wait for the end; True when the run ended by itself, and well."""
        try:
            return self.launcher.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False

    def end_launcher(self) -> None:
        """Interrupt the launcher if it is still there; the broker that it does not own stays."""
        if self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGINT)
            try:
                self.launcher.wait(60)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()

    def output(self) -> str:
        """The end of what the launcher said."""
        return (self.folder / "launcher.log").read_text("utf-8", "replace")[-4000:]

    def breaches(self) -> dict[str, list[str]]:
        """What `headrace verify` finds wrong, by property; every property is a key."""
        command = [HEADRACE, "verify", str(self.path), "--format", "json"]
        end = time.monotonic() + 60
        while True:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.stdout.startswith("{"):
                break
            if time.monotonic() > end:
                raise RuntimeError(f"headrace verify could not read the run: {done.stderr[-2000:]}")
            time.sleep(1.0)
        return {proof["name"]: list(proof["breaches"]) for proof in json.loads(done.stdout)["properties"]}
