#!/usr/bin/env bash
# Runs the project's own tests: `pytest tests -n auto "$@"`, in the environment that conformance.sh uses, which is
# made on the first run. Ends with pytest's exit status, or 10 when it cannot be set up.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
choose_python
note_compiler
exec "$python" -m pytest tests -n auto "$@"
