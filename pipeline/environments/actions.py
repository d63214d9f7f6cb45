"""How text becomes an action, in one way for all worlds that take one command a turn."""

import re

__all__ = ("command_of", "tagged")

_ACTION = re.compile(r"<action>(.*?)(?:</action>|\Z)", re.S)
_THOUGHT = re.compile(r".*</think>", re.S)


def command_of(text: str) -> str:
    """The last ``<action>`` of a text, else its last line; thinking before ``</think>`` is no part of it.

    >>> command_of("<think>go north?</think>\\nI will.\\n  go kitchen ")
    'go kitchen'
    >>> command_of("<action>take log</action> and then rest")
    'take log'
    """
    said = _THOUGHT.sub("", text)
    found = _ACTION.findall(said)
    lines = [line.strip() for line in (found[-1] if found else said).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last ``<tag>`` of a text outside its thinking; None when there is none.

    >>> tagged("<think><answer>1</answer></think><answer> 2 </answer>", "answer")
    '2'
    """
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", _THOUGHT.sub("", text), re.S)
    return str(found[-1]).strip() if found else None
