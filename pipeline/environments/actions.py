"""How text becomes an action, in one way for all worlds that take one command a turn."""

import re

__all__ = ("after_thinking", "command_of", "tagged")

_ACTION = re.compile(r"<action>(.*?)(?:</action>|\Z)", re.S)
_THOUGHT_END = "</think>"


def after_thinking(text: str) -> str:
    """What a text says after its last ``</think>``; all of it where there is none.

    >>> after_thinking("<think>8 or 9?</think>9")
    '9'
    """
    return text.rpartition(_THOUGHT_END)[2]


def command_of(text: str) -> str:
    """The last ``<action>`` of a text, else its last line; thinking before ``</think>`` is no part of it.

    >>> command_of("<think>go north?</think>\\nI will.\\n  go kitchen ")
    'go kitchen'
    >>> command_of("<action>take log</action> and then rest")
    'take log'
    """
    said = after_thinking(text)
    found = _ACTION.findall(said)
    lines = [line.strip() for line in (found[-1] if found else said).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last ``<tag>`` of a text outside its thinking; None when there is none.

    >>> tagged("<think><answer>1</answer></think><answer> 2 </answer>", "answer")
    '2'
    >>> tagged("<answer>1<answer>2</answer></answer>", "answer")
    '2'
    """
    said = after_thinking(text)
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = said.rfind(opening, 0, max(0, said.rfind(closing)))
    if start < 0:
        return None
    start += len(opening)
    return said[start : said.find(closing, start)].strip()
