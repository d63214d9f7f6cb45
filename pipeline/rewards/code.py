"""The reward ``code``: the share of a prompt's tests that the completion's program passes, each in the sandbox.

Goes in: a completion with a Python program (the last fenced block, else all of it) and a column of tests as JSON: a
list of {"input", "output"} for standard input and output, or text with assertions. Comes out: the share in 0 .. 1 (or 0
and 1 only), with the verdict of the first test that failed.
"""

import json
import re
import secrets
import time
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from headrace.pipeline.environments.sandbox import Sandbox, SandboxOptions
from headrace.pipeline.rewards.reward import Completion, Graded, RewardOptions
from headrace.schemas.records import Prompt

__all__ = ("Code", "CodeOptions", "program_of")

_FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.S)


class CodeOptions(RewardOptions):
    """Options of ``code``."""

    timeout_seconds: float = Field(60.0, gt=0)
    tests_column: str = "tests"
    """Column of the prompt with the tests; empty: the answer is the output expected without input."""
    partial: bool = True
    """Give the share of tests passed; else 1 for all of them and 0 for fewer."""
    most_tests: int = 32
    """Tests beyond are not run."""
    sandbox: SandboxOptions = SandboxOptions()


@dataclass(frozen=True, slots=True)
class _Test:
    stdin: str
    output: str
    harness: str = ""


class Code:
    """The share of a prompt's tests that the completion's program passes. Raises SandboxMissing."""

    Options: ClassVar[type[RewardOptions]] = CodeOptions
    scope: ClassVar[Literal["trajectory", "group"]] = "trajectory"
    isolation: ClassVar[Literal["process", "inline", "thread"]] = "process"

    def __init__(self, options: CodeOptions) -> None:
        self._options = options
        self._sandbox = Sandbox(options.sandbox)

    def __call__(self, prompt: Prompt, completion: Completion) -> Graded:
        """Run the tests. Raises ValueError for a column that holds no tests."""
        tests = self._tests(prompt)
        program = program_of(completion.text)
        end = time.monotonic() + self._options.timeout_seconds * 0.9
        passed, said = 0, ""
        for number, test in enumerate(tests):
            left = end - time.monotonic()
            if left <= 0:
                said = said or f"timeout: no time left for test {number}"
                break
            problem = self._problem(program, test, left)
            passed += not problem
            if problem and not said:
                said = f"{problem} (test {number} of {len(tests)})"
            if problem and not self._options.partial:
                break
        share = passed / len(tests)
        value = share if self._options.partial else float(share == 1)
        return Graded({"code": value}, {"code": said or "ok"})

    def _problem(self, program: str, test: _Test, left: float) -> str:
        """Why a test is not passed; empty when it is."""
        if test.harness:
            # asked for after the program has run, half of it on standard input and half in the source, so that one
            # which exits early, or says what it read and exits, has not passed
            read, written = secrets.token_hex(16), secrets.token_hex(16)
            source = f"{program}\n\n_word = input()\n{test.harness}\nprint(_word + {written!r})\n"
            verdict = self._sandbox.run(source, stdin=read + "\n", wall_seconds=left)
            right = verdict.output.rstrip().endswith(read + written)
        else:
            verdict = self._sandbox.run(program, stdin=test.stdin, wall_seconds=left)
            right = _lines(verdict.output) == _lines(test.output)
        if verdict.kind != "ok":
            last = verdict.errors.strip().splitlines()[-1:] or [""]
            return f"{verdict} {last[0][:200]}".rstrip()
        return "" if right else f"wrong: {verdict.output[:100]!r}"

    def _tests(self, prompt: Prompt) -> list[_Test]:
        column = self._options.tests_column
        if not column:
            return [_Test("", prompt.answer)]
        text = prompt.columns.get(column, "")
        if not text.strip():
            raise ValueError(f"prompt {prompt.prompt_id} has no tests: its column {column!r} is empty or missing")
        try:
            found = json.loads(text)
        except ValueError:
            return [_Test("", "", text)]
        if not isinstance(found, list) or not found or not all(_is_test(x) for x in found):
            raise ValueError(
                f'prompt {prompt.prompt_id}, column {column!r}: tests are a list of {{"input": text, "output": text}}, '
                "or text with assertions"
            )
        return [_Test(str(x["input"]), str(x["output"])) for x in found[: self._options.most_tests]]


def program_of(text: str) -> str:
    """The last fenced block of a text, one that is cut off included; the whole text when there is none."""
    blocks = _FENCE.findall(text)
    return str(blocks[-1]) if blocks else text


def _is_test(value: object) -> bool:
    return isinstance(value, dict) and {"input", "output"} <= set(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
