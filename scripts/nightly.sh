#!/usr/bin/env bash
# Runs all that .ci/run checks of a change, and what each submission leaves to the night: scripts/nightly.sh [STEP ...].
# Takes several hours on two cores.
. "$(dirname "$0")/common.sh"
exec .ci/run --night "$@"
