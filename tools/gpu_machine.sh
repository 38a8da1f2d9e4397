#!/usr/bin/env bash
# On a machine with a GPU and no network: install, run the tests marked cuda, and measure all systems.
#
#   tools/gpu_machine.sh [options of benchmarks.gpu.everything]
#
# A second call goes on where the first one ended. While the tests run, the benchmarks' process imports, makes its graph
# and compiles kernels. Variables:
#   MINUTES=9     no part begins that would probably end later
#   TESTS=1       0: no tests
#   OUT           a folder for gpu_results.tgz and tests.log, for machines that hand back few files
#   PYTHON, PIP   python3 and pip; or those of .venv, if it exists
#   REHEARSE=1    the same without a GPU: kernels are interpreted, the CPU takes the GPU's place in training, times mean
#                 nothing, results are in OUT or nowhere
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$([ -x .venv/bin/python ] && echo .venv/bin/)
python=${PYTHON:-${bin:-}python$([ -z "$bin" ] && echo 3)} pip=${PIP:-${bin:-}pip}
scratch=$(mktemp -d) results=benchmarks/results log=${OUT:-$scratch}/tests.log options=("$@")
trap 'rm -rf "$scratch"' EXIT
[ -z "${OUT:-}" ] || mkdir -p "$OUT"
say() { echo "gpu-machine: $* ($SECONDS s)"; }

if [ "${REHEARSE:-0}" = 1 ]; then
    export TRITON_INTERPRET=1
    # Without Hydra, but for what Lightning asks where its metadata is found.
    echo "raise ImportError('rehearsed without it')" >"$scratch/omegaconf.py"
    mkdir -p "$scratch/hydra/core"
    touch "$scratch/hydra/__init__.py" "$scratch/hydra/core/__init__.py"
    echo 'class HydraConfig: initialized = staticmethod(lambda: False)' >"$scratch/hydra/core/hydra_config.py"
    echo 'get_original_cwd = to_absolute_path = None' >"$scratch/hydra/utils.py"
    results=$scratch/results options=(--interpret --runs 1 ${options[@]+"${options[@]}"})
fi
export PYTHONPATH=$scratch${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# An installed copy of another folder would be measured in place of this one.
installed='import sys; from importlib.util import find_spec
sys.path = [folder for folder in sys.path if folder]
print(getattr(find_spec("lightning_gnn"), "origin", ""))'
if [[ $("$python" -c "$installed" 2>/dev/null) != "$PWD/lightning_gnn/__init__.py" ]]; then
    "$pip" install --quiet --no-index --no-deps --no-build-isolation -e . || { say "$pip failed; set PIP"; exit 1; }
    [[ $("$python" -c "$installed" 2>/dev/null) == "$PWD/lightning_gnn/__init__.py" ]] || {
        say "$pip installed for another Python than $python; set PIP or PYTHON"; exit 1; }
fi
missing=$("$python" -c '
from importlib.util import find_spec
names = """torch triton pytorch_lightning torch_geometric torchmetrics numba numpy scipy yaml rich jinja2 matplotlib
psutil filelock cloudpickle pytest pytest_timeout hypothesis"""
print(*(name for name in names.split() if find_spec(name) is None))')
[ -z "$missing" ] || { say "$python lacks $missing: carry their wheels, and install them with --no-index"; exit 1; }
if ! "$python" -c 'import platformdirs' 2>/dev/null; then
    say "platformdirs is missing; a stand-in names the folder of caches"
    echo 'user_cache_path = lambda name, appauthor: __import__("pathlib").Path.home() / ".cache" / name' \
        >"$scratch/platformdirs.py"
fi
say "installed"

after=() tests=0
if [ "${TESTS:-1}" = 1 ]; then
    # Other files import Hydra; its plugin of pytest would, too.
    timeout --kill-after=10 300 "$python" -m pytest -m cuda -p no:cacheprovider -p no:hydra_pytest \
        $(grep -rl 'mark\.cuda' tests --include=*.py) >"$log" 2>&1 &
    tests=$! after=(--after "$tests")
fi
left=$("$python" -c "print(max(0, ${MINUTES:-9} - $SECONDS / 60))")
timeout --kill-after=10 "$("$python" -c "print(60 * $left + 30)")" \
    "$python" -m benchmarks.gpu.everything --minutes "$left" --out "$results" ${after[@]+"${after[@]}"} ${options[@]+"${options[@]}"}
measured=$? tested=0
[ ! -f "$results/gpu.md" ] || sed -n '/^- /p; /^## Roofline/q' "$results/gpu.md"
[ "$tests" = 0 ] || { wait "$tests"; tested=$?; }
[ $tested = 0 ] || { grep -E '^(FAILED|ERROR)|[Ee]rror' "$log" | tail -20; say "tests ended with $tested"; }
if [ -n "${OUT:-}" ] && [ -d "$results" ]; then
    tar -czf "$OUT/gpu_results.tgz" -C "$results" $(cd "$results" && ls | grep '^gpu')
fi
say "done: benchmarks $measured, tests $tested"
exit $((measured || tested))
