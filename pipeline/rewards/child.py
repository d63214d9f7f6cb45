"""The process in which rewards run: reads calls from standard input, writes results, lives as long as its parent.

Goes in: pickled (reward name, options, prompt, completion), one a frame; comes out: ``None`` once the reward is
loaded, then (parts, error text). A reward that hangs is ended from outside; when the parent dies, the calls end and
this process exits even while a reward runs, with all that it started.
"""

import os
import pickle
import queue
import signal
import struct
import threading
from typing import IO, Any

from headrace.pipeline.rewards.reward import RewardFailed, call_group_reward, call_reward, load_reward
from headrace.schemas.errors import ConfigurationError

__all__ = ("connected", "feed", "take_frame", "write_frame")

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


def connected(calls: "queue.Queue[Any]") -> IO[bytes]:
    """The stream for results, with a thread that puts every call that arrives into the queue.

    Plug-ins and what they start find nothing on standard input, which would be calls, and print to standard error.
    """
    source, out = os.dup(0), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    threading.Thread(target=feed, args=(calls, source), name="calls", daemon=True).start()
    return out


def feed(calls: "queue.Queue[Any]", source: int = 0) -> None:
    """Put every call that arrives into the queue; when they end, end the process, whatever it does, and its group."""
    buffer = bytearray()
    while data := os.read(source, 1 << 16):
        buffer += data
        while (frame := take_frame(buffer)) is not None:
            calls.put(frame[0])
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    """Serve calls until they end."""
    calls: queue.Queue[Any] = queue.Queue()
    out = connected(calls)
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
