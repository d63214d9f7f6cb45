#!/usr/bin/env bash
# Run one named phase of a build and print how long it took: infra/phase.sh NAME COMMAND...
# The command's exit status is kept.
set -uo pipefail
name=$1
shift
started=$SECONDS
printf -- '--- %s\n' "$name"
"$@"
status=$?
printf -- '--- %s: %d s%s\n' "$name" $((SECONDS - started)) "$([ $status -eq 0 ] || printf ', exit status %d' $status)"
exit $status
