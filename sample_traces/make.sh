#!/usr/bin/env bash
# Makes the sample traces anew. The first and the last need root and iproute2. Run from the repository's
# root, in an environment with ddltrace[experiments], on a machine that does nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

experiment=$(mktemp -d)/shaped
ddltrace experiment run --strategy ddp:bucket_mb=1 --hosts 4 --bandwidth 400mbit \
    --steps 40 --width 48 -o "$experiment"
rm -rf sample_traces/ddp-4-hosts-400mbit
mv "$(find "$experiment" -name run.json -printf '%h')" sample_traces/ddp-4-hosts-400mbit

ddltrace run --force -o sample_traces/straggler -- \
    torchrun --nproc-per-node 2 docs/examples/train_with_straggler.py

# One traced run of each of eight strategies, with the results that compare them.
catalogue=sample_traces/experiment-400mbit
rm -rf "$catalogue"
ddltrace experiment run --hosts 4 --bandwidth 400mbit --steps 16 --warmup 4 --width 48 \
    --target-loss 2.1 --strategy ddp --strategy ddp:bucket_mb=1 --strategy fifo --strategy wfbp \
    --strategy p3 --strategy bf16 --strategy int8 --strategy topk:density=0.01+feedback \
    -o "$catalogue"
rm -f "$catalogue"/*.log "$catalogue"/*.outcome.json

# Where this machine keeps its Python and its temporary files is nobody's business.
bin=$(dirname "$(command -v python3)")
sed -i -e "s|$bin/||g" -e "s|$experiment/||g" -e 's|"/[^"]*/site-packages/|"|g' \
    -e 's|"/[^"]*/lib/python3[.0-9]*/|"|g' \
    sample_traces/*/run.json sample_traces/*/*/run.json
