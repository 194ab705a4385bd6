#!/usr/bin/env bash
# Makes the sample traces anew. The first needs root and iproute2. Run from the repository's
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

# Where this machine keeps its Python and its temporary files is nobody's business.
bin=$(dirname "$(command -v python3)")
sed -i -e "s|$bin/||g" -e "s|$experiment/||g" -e 's|"/[^"]*/site-packages/|"|g' sample_traces/*/run.json
