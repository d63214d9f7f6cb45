"""`python -m headrace.connectors.broker --data DIR --port N`: the local broker without the rest of headrace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace.connectors.broker.launch import BrokerStartError, run
from headrace.schemas.errors import EXIT_CONFIGURATION


def main() -> int:
    """Read the options and serve; 78 when the broker cannot start."""
    parser = argparse.ArgumentParser(prog="python -m headrace.connectors.broker", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder for topics and state")
    parser.add_argument("--port", type=int, default=9092, help="port on 127.0.0.1; 0 chooses a free one")
    parser.add_argument(
        "--auto-create", action=argparse.BooleanOptionalAction, default=True, help="create topics when they are used"
    )
    parser.add_argument("--partitions", type=int, default=4, help="partitions of topics created without a number")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the process that started this ends")
    given = parser.parse_args()
    try:
        run(given.data, given.port, given.auto_create, given.partitions, given.exit_with_parent)
    except BrokerStartError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(main())
