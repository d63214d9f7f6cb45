"""The process in which rewards run: reads calls from standard input, writes results, lives as long as its parent.

Goes in: pickled (reward name, options, prompt, completion), one a frame; comes out: ``None`` once the reward is
loaded, then (parts, error text). A reward that hangs is ended from outside; when the parent dies, standard input
closes and this process exits even while a reward runs.
"""

import os
import pickle
import queue
import struct
import threading
from typing import IO, Any

from headrace.pipeline.rewards.reward import RewardFailed, call_group_reward, call_reward, load_reward
from headrace.schemas.errors import ConfigurationError

__all__ = ("feed", "take_frame", "write_frame")

_LENGTH = struct.Struct("<I")


def write_frame(stream: IO[bytes], value: Any) -> None:
    """Write one pickled value with its length in front."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def take_frame(buffer: bytearray) -> tuple[Any] | None:
    """The first whole value of a buffer, taken out of it, in a tuple of one; None while it is not whole."""
    if len(buffer) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
    if len(buffer) < end:
        return None
    value = pickle.loads(bytes(buffer[_LENGTH.size : end]))
    del buffer[:end]
    return (value,)


def feed(calls: "queue.Queue[Any]") -> None:
    """Put every call that arrives into the queue; end the process, whatever it does, when standard input closes."""
    buffer = bytearray()
    while data := os.read(0, 1 << 16):
        buffer += data
        while (frame := take_frame(buffer)) is not None:
            calls.put(frame[0])
    os._exit(0)


def main() -> None:
    """Serve calls until standard input closes. What rewards print goes to standard error."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    calls: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=feed, args=(calls,), name="calls", daemon=True).start()
    loaded: dict[str, Any] = {}
    while True:
        name, options, prompt, completion = calls.get()
        key = f"{name} {options!r}"
        try:
            if key not in loaded:
                loaded[key] = load_reward(name, options)
            write_frame(out, None)
            call = call_group_reward if isinstance(completion, list) else call_reward
            result: tuple[Any, str] = (call(name, loaded[key], prompt, completion), "")
        except (RewardFailed, ConfigurationError) as error:
            result = ({}, str(error))
        write_frame(out, result)


if __name__ == "__main__":
    main()
