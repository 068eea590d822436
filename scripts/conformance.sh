#!/usr/bin/env bash
# Runs the conformance matrices on every kernel that can run here: `pytest -n auto "$@"`, in an environment that is
# made on the first run. Ends with pytest's exit status (0: all pass, 1: failures), or 10 when it cannot be set up.
#
#   bash scripts/conformance.sh                        every operator's default tiers, every kernel
#   bash scripts/conformance.sh -m smoke               the covering subset, for pull requests
#   bash scripts/conformance.sh --tier full            see docs/options.md for all options
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

choose_python
note_compiler

# pytest takes an existing directory that follows an option it does not know yet for the root of the tests, so
# `--report-dir DIR` becomes `--report-dir=DIR`, and `--kernels FILE` `--kernels=FILE`.
directory=$root/reports
arguments=(-n auto)
while [ $# -gt 0 ]; do
    case $1 in
        --report-dir) [ $# -gt 1 ] || fail "--report-dir needs a directory" && directory=$2 && shift ;;
        --report-dir=*) directory=${1#*=} ;;
        --kernels) [ $# -gt 1 ] || fail "--kernels needs a name or a file" && arguments+=("--kernels=$2") && shift 2 && continue ;;
        *) arguments+=("$1") && shift && continue ;;
    esac
    arguments+=("--report-dir=$directory")
    shift
done

before=$(mktemp) || fail "cannot write a temporary file: is the disk full?"
trap 'rm -f "$before"' EXIT
status=0
"$python" -m pytest "${arguments[@]}" || status=$?
pages=$(find "$directory" -maxdepth 2 -name '*.html' -newer "$before" 2>/dev/null | sort) || true
while IFS= read -r page; do
    case $page in '') continue ;; /*) ;; *) page=$root/$page ;; esac
    say "HTML report: $page"
done <<<"$pages"
exit "$status"
