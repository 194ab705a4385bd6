#!/usr/bin/env bash
# Installs, tests and measures ddltrace on this machine, without network.
#
#   bash run.sh [--budget SECONDS] [--python PYTHON] [--output FOLDER] [--cpu-dry-run]
#
# Everything is installed into FOLDER/site; the machine's own Python stays as it is, and brings
# PyTorch. Results are in FOLDER after each part, what decides most comes first. Two ranks can share
# a GPU over NCCL 2.30 and newer: set LD_PRELOAD to a libnccl.so.2 if PyTorch brings an older one.
set -u
budget=480 python=python3 output=gpu-kit-results dry=
while [ $# -gt 0 ]; do
  case $1 in
    --budget) budget=$2; shift 2 ;;
    --python) python=$2; shift 2 ;;
    --output) output=$2; shift 2 ;;
    --cpu-dry-run) dry=--cpu-dry-run; shift ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
done
case $budget in '' | *[!0-9]*) echo "run.sh: --budget takes whole seconds" >&2; exit 2 ;; esac
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$output" || exit 1
output=$(cd "$output" && pwd)
started=$SECONDS
left() { echo $((budget - SECONDS + started)); }

"$python" -c 'import torch, numpy' || { echo "run.sh: $python has no PyTorch with numpy" >&2; exit 1; }
"$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade \
  --target "$output/site" "$here"/wheels/*.whl || exit 1
export PYTHONPATH=$output/site:$here/tests${PYTHONPATH:+:$PYTHONPATH} NCCL_MULTI_RANK_GPU_ENABLE=1
cd "$output" || exit 1

failed=0
: > summary.txt
part() { # NAME COMMAND...: runs a part in the time that is left
  local name=$1 begun=$SECONDS status=0 seconds
  shift
  seconds=$(left)
  if [ "$seconds" -le 5 ]; then
    echo "skipped       $name: the budget is spent" >> summary.txt
    return
  fi
  echo "$name ($seconds s left)" >&2
  timeout "$seconds" "$@" > "$name.txt" 2>&1 || status=$?
  case $status in
    0) word=ok ;;
    124) word=unfinished; failed=1 ;;
    *) word=failed; failed=1; tail -n 15 "$name.txt" >&2 ;;
  esac
  printf '%-10s %4d s %s: %s\n' "$word" $((SECONDS - begun)) "$name" "$(tail -n 1 "$name.txt")" >> summary.txt
}
tests=("$python" -m pytest -p no:cacheprovider -q -rfs --rootdir "$here" -W ignore "$here/tests/gpu")

part doctor "$python" -m ddltrace doctor
part tests "${tests[@]}" -s
part benchmark "$python" "$here/benchmarks/gpu.py" --output "$output/benchmark" --budget "$(left)" $dry

echo
[ -f benchmark/report.txt ] && cat benchmark/report.txt
cat summary.txt
exit $failed
