"""A trainer that stands still for a time with a Step in an open transaction: ``BATCH SECONDS ARGUMENTS``."""

import sys
import time
from typing import Any

from headrace.connectors.transaction import Transaction
from headrace.schemas.codec import decode
from headrace.schemas.records import Step
from headrace.trainers.__main__ import main

if __name__ == "__main__":
    batch, seconds, real, due = int(sys.argv[1]), float(sys.argv[2]), Transaction.produce, [True]

    def produce(self: Transaction, topic: str, value: bytes | None, *more: Any) -> None:
        """Produce, send it, then wait."""
        real(self, topic, value, *more)
        record = decode(value) if value else None
        if due and isinstance(record, Step) and record.batch == batch:
            due.clear()
            self._producer.flush(5)
            time.sleep(seconds)

    Transaction.produce = produce  # type: ignore[method-assign]
    sys.exit(main(sys.argv[3:]))
