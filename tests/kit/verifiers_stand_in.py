"""Two tiny environments for verifiers, and a stand-in for the library with the classes, names and calls that are used.

The environments run unchanged on the real library (0.1.14 and 0.4.0 were tried). The stand-in plays an episode as it
does: the environment asks the endpoint, its functions score, what fails is told in the same fields.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ("install", "packages")

SUMS = '''
"""A classic package: sums, with a second try. Row 3 breaks, row 4 never returns, row 5 is scored as nothing."""
import time
from pathlib import Path

import verifiers as vf
from datasets import Dataset


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        if state["info"]["a"] == 3:
            raise RuntimeError("the environment broke")
        if state["info"]["a"] == 4:
            Path(__file__).with_name("hangs").touch()
            time.sleep(600)
        return [{"role": "user", "content": "Try again."}]


def load_environment(count=6, grouped=False):
    rows = [
        {"question": f"{a}+{a + 1}=", "answer": str(2 * a + 1), "info": {"a": a}} for a in range(count)
    ]

    def correct(completion, answer, info, **_):
        return float("nan") if info["a"] == 5 else float(completion[-1]["content"].strip() == answer)

    def turns(state, **_):
        return float(len(state["trajectory"]))

    def best(completions, **_):
        return [0.0 for _ in completions]

    rubric = vf.Rubric(funcs=[best] if grouped else [correct], weights=[2.0])
    if not grouped:
        rubric.add_metric(turns)
    return Twice(
        dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows[:2]), rubric=rubric, max_turns=2,
        system_prompt="Be brief.",
    )
'''

TASKS = '''
"""A taskset package: the same sums, played in process. Task 3 breaks, task 4 never returns, task 5 has no reward."""
import asyncio
import json
import time
import urllib.request
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def correct(self, trace):
        return {} if self.data.idx == 5 else float(trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace):
        return float(trace.num_turns)


class Sums(vf.Taskset[Sum]):
    def load(self):
        for a in range(6):
            data = Data(prompt=f"{a}+{a + 1}=", system_prompt="Be brief.", answer=str(2 * a + 1), name=f"sum {a}")
            yield Sum(data, self.config.task)


class InProcess(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]

        def ask():
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}
            body = json.dumps({"model": ctx.model, "messages": messages}).encode()
            request = urllib.request.Request(endpoint + "/chat/completions", body, headers)
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]

        for _ in range(2):
            messages.append({"role": "assistant", "content": await asyncio.to_thread(ask)})
            messages.append({"role": "user", "content": "Try again."})
            if data.idx == 3:
                raise RuntimeError("the environment broke")
            if data.idx == 4:
                time.sleep(600)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["InProcess", "Sums"]
'''

DATASETS = """
class Dataset(list):
    @classmethod
    def from_list(cls, rows):
        return cls(rows)

    def select(self, numbers):
        return Dataset(self[n] for n in numbers)
"""

CLASSIC = '''
"""Stand-in: what is used of verifiers 0.1.14."""
import asyncio
import importlib
import inspect
import json
import urllib.request

__version__ = "0.1.14 (stand-in)"


class ClientConfig:
    def __init__(self, *, client_type, api_base_url, api_key_var, max_retries):
        assert client_type == "openai_chat_completions" and max_retries == 0 and api_key_var
        self.api_base_url = api_base_url


class Rubric:
    def __init__(self, funcs=(), weights=()):
        self.funcs, self.weights = list(funcs), list(weights)

    def add_metric(self, func):
        self.funcs.append(func)
        self.weights.append(0.0)

    def score(self, state):
        values = {f.__name__: f(**state, state=state) for f in self.funcs}
        return sum(v * w for v, w in zip(values.values(), self.weights, strict=True)), values


class MultiTurnEnv:
    def __init__(self, *, dataset, eval_dataset, rubric, max_turns, system_prompt):
        self._tables = [self._prompted(rows, system_prompt) for rows in (dataset, eval_dataset)]
        self._rubric, self._turns = rubric, max_turns

    @staticmethod
    def _prompted(rows, system):
        first = {"role": "system", "content": system}
        return type(rows)(
            {**row, "prompt": [first, {"role": "user", "content": row["question"]}], "example_id": number}
            for number, row in enumerate(rows)
        )

    @property
    def requires_group_rollouts(self):
        return any("completions" in inspect.signature(f).parameters for f in self._rubric.funcs)

    def get_dataset(self, n=-1, seed=None):
        return self._tables[0].select(range(min(n, len(self._tables[0])))) if n > 0 else self._tables[0]

    def get_eval_dataset(self, n=-1, seed=None):
        return self._tables[1].select(range(min(n, len(self._tables[1])))) if n > 0 else self._tables[1]

    async def run_rollout(self, input, client, model, sampling_args, max_retries=0, state_columns=None):
        state = {**input, "completion": [], "trajectory": []}
        while True:
            body = json.dumps({"model": model, "messages": [*input["prompt"], *state["completion"]], **sampling_args})
            reply = await asyncio.to_thread(self._ask, client.api_base_url, body.encode())
            state["completion"].append({"role": "assistant", "content": reply})
            state["trajectory"].append(reply)
            if len(state["trajectory"]) == self._turns:
                break
            state["completion"] += await self.env_response(state["completion"], state)
        reward, metrics = self._rubric.score(state)
        return {"reward": reward, "metrics": metrics, "completion": state["completion"], "error": None}

    @staticmethod
    def _ask(url, body):
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]


def load_environment(env_id, **env_args):
    return importlib.import_module(env_id.replace("-", "_").split("/")[-1]).load_environment(**env_args)
'''

V1 = '''
"""Stand-in: what is used of verifiers.v1 0.4.0."""
import contextlib
import http.server
import importlib
import json
import threading
import types
import urllib.request

from pydantic import BaseModel


class TaskData(BaseModel):
    idx: int | None = None
    name: str | None = None
    prompt: str | None = None
    system_prompt: str | None = None


def reward(weight=1.0):
    return lambda function: setattr(function, "weight", weight) or function


def metric(function):
    function.metric = True
    return function


class _Generic:
    def __class_getitem__(cls, parameter):
        return type(cls.__name__, (cls,), {"parameter": parameter})


class Task(_Generic):
    def __init__(self, data, config=None):
        self.data = data

    @classmethod
    def data_type(cls):
        return cls.parameter

    async def score(self, trace):
        for name in dir(type(self)):
            function = getattr(type(self), name)
            if hasattr(function, "weight"):
                value = await function(self, trace)
                if not isinstance(value, dict):
                    trace.rewards[name] = types.SimpleNamespace(value=value * function.weight)
            elif hasattr(function, "metric"):
                trace.metrics[name] = await function(self, trace)


class Taskset(_Generic):
    INFINITE = False

    def __init__(self, config):
        self.config = config

    @classmethod
    def task_type(cls):
        return cls.parameter

    def __iter__(self):
        for number, task in enumerate(self.load()):
            task.data = task.data.model_copy(update={"idx": number})
            yield task


class HarnessConfig(BaseModel):
    pass


class Harness(_Generic):
    def resolve_prompt(self, data):
        return data.system_prompt, data.prompt


class ProgramResult:
    def __init__(self, exit_code, stdout, stderr):
        pass


class EvalClientConfig:
    def __init__(self, *, base_url, api_key_var):
        self.base_url = base_url


class ModelContext:
    def __init__(self, *, model, client):
        self.model, self.client = model, client


def resolve_env_config(data):
    assert set(data) <= {"taskset", "agent"}
    return types.SimpleNamespace(taskset=types.SimpleNamespace(id=data["taskset"]["id"], task=None))


def _exported(name, kind):
    module = importlib.import_module(name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower())
    return next(o for n in module.__all__ if issubclass(o := getattr(module, n), kind))


def load_taskset(config):
    return _exported(config.id, Taskset)(config)


def load_environment(config):
    return _Env(config)


class _Env:
    def __init__(self, config):
        self.taskset, self._harness = load_taskset(config.taskset), _exported(config.taskset.id, Harness)()

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    def slots(self, task, n=1):
        return [task]

    async def run_slot(self, task, ctx):
        trace = types.SimpleNamespace(rewards={}, metrics={}, errors=[], replies=[])
        episode = types.SimpleNamespace(ok=True, errors=[], traces=[trace])
        relay = _relay(ctx.client.base_url, trace.replies)
        try:
            endpoint = f"http://127.0.0.1:{relay.server_port}"
            await self._harness.launch(ctx, trace, None, endpoint, "secret", {}, task.data)
        except Exception as error:
            trace.errors.append(types.SimpleNamespace(type=type(error).__name__, message=str(error)))
            episode.ok = False
            return episode
        finally:
            relay.shutdown()
            relay.server_close()
        trace.last_reply, trace.num_turns = trace.replies[-1], len(trace.replies)
        await task.score(trace)
        return episode


def _relay(url, replies):
    """The server between a harness and the endpoint, which sees every reply."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = urllib.request.Request(url + self.path, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                said = answer.read()
            replies.append(json.loads(said)["choices"][0]["message"]["content"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server
'''


def packages(folder: Path) -> Path:
    """Write the two environments as installed packages, and a description of each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny_sums.py").write_text(SUMS)
    (folder / "tiny_tasks.py").write_text(TASKS)
    (folder / "classic.toml").write_text('environment = "owner/tiny-sums"\nsettings = { count = 6 }\n')
    runtime = 'settings = { agent = { runtime = { type = "subprocess" } } }\n'
    (folder / "tasksets.toml").write_text(f'environment = "tiny-tasks"\n{runtime}')
    return folder


def install(folder: Path) -> Path:
    """Write the stand-in where an import finds it."""
    (folder / "verifiers").mkdir(parents=True)
    (folder / "verifiers" / "__init__.py").write_text(CLASSIC)
    (folder / "verifiers" / "v1.py").write_text(V1)
    (folder / "datasets.py").write_text(DATASETS)
    return folder
