# Finds or makes the Python that runs the suite. Sourced by the scripts beside it; sets `root` and `python`.
#
# In this order:
#   1. CONFORMANCE_PYTHON, as it is;
#   2. python3, as it is, when its torch sees a GPU: nothing is ever installed over a GPU machine's own torch;
#   3. .venv in the checkout, made from constraints.txt on the first run.
#
# .venv is complete when it holds a copy of constraints.txt, which is put there last. Anything else under that name
# is an interrupted or outdated attempt, and is made anew.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=
venv=$root/.venv
made_here=$venv/made-by-conformance
setup_failed=10 # pytest itself ends with 0 to 5

say() { printf '%s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit "$setup_failed"
}

choose_python() {
    cd -- "$root" || fail "cannot enter $root"
    if [ -n "${CONFORMANCE_PYTHON:-}" ]; then
        python=$CONFORMANCE_PYTHON
        "$python" -c '' 2>/dev/null || fail "CONFORMANCE_PYTHON=$python does not run (give an absolute path)"
        new_enough "$python" || fail "CONFORMANCE_PYTHON=$python is older than Python 3.10"
        require_modules
        say "Using CONFORMANCE_PYTHON as it is: $python"
    elif sees_gpu python3; then
        python=python3
        require_modules
        say "Using $(command -v python3) as it is: its torch sees a GPU."
    else
        environment_complete || make_environment
        python=$venv/bin/python
    fi
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

sees_gpu() {
    new_enough "$1" && "$1" -c '
import importlib.util, sys
if importlib.util.find_spec("torch") is None:
    sys.exit(1)
import torch
sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1
}

# An environment that is used as it is must bring what the suite imports.
require_modules() {
    local missing
    missing=$("$python" -c '
import importlib.util, sys
needed = {"torch": "torch", "numpy": "numpy", "pytest": "pytest", "xdist": "pytest-xdist", "jinja2": "jinja2",
          "hypothesis": "hypothesis"}
if sys.version_info < (3, 11):
    needed["tomli"] = "tomli"
print(*(package for module, package in needed.items() if importlib.util.find_spec(module) is None))') ||
        fail "$python cannot look up its packages"
    [ -z "$missing" ] || fail "$python is used as it is, but lacks: $missing (pip install them there)"
}

environment_complete() {
    cmp -s "$root/constraints.txt" "$venv/constraints.txt" && "$venv/bin/python" -c '' 2>/dev/null
}

make_environment() {
    local base
    base=$(find_base) || fail "no Python 3.10 or newer on PATH: install python3, or set CONFORMANCE_PYTHON"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$base has no venv module: install it (Debian and Ubuntu: apt-get install python3-venv)"
    { mkdir -p "$root/.cache" && exec 9>"$root/.cache/environment.lock"; } 2>/dev/null ||
        fail "cannot write in $root: $(why_not_writable)"
    if command -v flock >/dev/null && ! flock -n 9; then
        say "Another run is making .venv; waiting for it."
        flock 9 || true
    fi
    if ! environment_complete; then # the run that was waited for may have made it
        discard_environment
        install_environment "$base"
    fi
    exec 9>&- # releases the lock
}

find_base() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if new_enough "$name"; then # not the .venv that may be active, but the Python that it was made with
            "$name" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'
            return
        fi
    done
    return 1
}

# Renamed before it is deleted, so that an interrupted deletion leaves nothing half-deleted under the name .venv.
discard_environment() {
    rm -rf "$root/.venv-old"
    rmdir "$venv" 2>/dev/null || true
    [ -e "$venv" ] || return 0
    [ -e "$made_here" ] || fail "$venv was not made by this script: move it away, or set CONFORMANCE_PYTHON to use it"
    mv "$venv" "$root/.venv-old"
    rm -rf "$root/.venv-old"
}

install_environment() {
    local base=$1 started=$SECONDS
    say "[1/3] Making .venv with $("$base" --version) ..."
    { mkdir "$venv" && : >"$made_here"; } 2>/dev/null || fail "cannot make $venv: $(why_not_writable)"
    "$base" -m venv "$venv" >"$venv/venv.log" 2>&1 ||
        fail "$base cannot make a virtual environment: $(last_line "$venv/venv.log")"
    say "[2/3] Installing the packages of constraints.txt, once ..."
    # PYTHONPATH must not make pip believe that something is there already. Wheels only: no compiler is needed.
    env -u PYTHONPATH -u PYTHONHOME PIP_USER=0 "$venv/bin/python" -m pip install --disable-pip-version-check \
        --no-input --only-binary=:all: --log "$venv/install.log" -r "$root/constraints.txt" \
        2>"$venv/install.err" || fail "$(explain_pip)"
    cp "$root/constraints.txt" "$venv/constraints.partial" && mv "$venv/constraints.partial" "$venv/constraints.txt" ||
        fail "cannot write in $venv: $(why_not_writable)"
    say "[3/3] .venv is ready after $((SECONDS - started)) s."
}

explain_pip() {
    if grep -qs 'No space left on device' "$venv/install.log" "$venv/install.err"; then
        printf 'no disk space is left for .venv or for pip'"'"'s temporary files (TMPDIR)'
    else
        printf 'pip could not install constraints.txt: %s; pip'"'"'s log is %s; run this again to retry' \
            "$(pip_error)" "$venv/install.log"
    fi
}

# The first error names the package; those that follow are about that one.
pip_error() {
    local line
    line=$(grep -hs 'ERROR: ' "$venv/install.log" "$venv/install.err" | head -n 1)
    [ -n "$line" ] && printf '%s' "${line#*ERROR: }" || last_line "$venv/install.err"
}

last_line() { tail -n 1 "$1" 2>/dev/null; }

why_not_writable() {
    if [ -w "$root" ]; then printf 'is the disk full?'; else printf 'no permission'; fi
}

# The suite itself says the same in its report; here it comes before minutes of running.
note_compiler() {
    local reason
    reason=$("$python" -c 'from kernels.tilelang_build import missing; print(missing("cpu") or "")' 2>/dev/null) || return 0
    [ -z "$reason" ] || say "Note: $reason: the TileLang CPU kernels will be reported as not run."
}
