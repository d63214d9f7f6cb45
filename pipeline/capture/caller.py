"""The process of a Python callable that plays an episode: ``python -m headrace.pipeline.capture.caller MODULE:NAME``.

Goes in: the prompt as one JSON object on standard input; comes out: what the callable returns (a reward, or an object
with ``reward`` and ``completion``) as the last line of standard output.
"""

import asyncio
import importlib
import inspect
import json
import sys
from typing import Any

__all__ = ("main",)


def main(arguments: list[str]) -> int:
    """Call it. Raises what it raises."""
    module, _, name = arguments[0].partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    result = found(json.load(sys.stdin))
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    shown = result if isinstance(result, dict) else {} if result is None else {"reward": result}
    sys.stdout.write("\n" + json.dumps(shown) + "\n")
    return 0


async def _awaited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
