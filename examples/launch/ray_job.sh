#!/bin/bash
# Submit a job to a Ray cluster whose workers import this library, as verl's and slime's do.
#   PLUGIN=rl_plugin COMMON=/common examples/launch/ray_job.sh python -m verl.trainer.main_ppo OVERRIDES...
# Workers have no command line of this library: the module PLUGIN, below the working folder, switches features on
# (docs/hosts/dsa-in-rl.md). Variables reach workers through the runtime environment, not through this shell.

set -euo pipefail
: "${PLUGIN:?name the module that calls mindspeed_dsa.enable}" "${COMMON:?name a folder that all nodes see}"

ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --working-dir . \
    --runtime-env-json "$(printf '{"env_vars": {
        "VERL_USE_EXTERNAL_MODULES": "%s",
        "MINDSPEED_DSA_MINDSPEED_REPORT_DIR": "%s",
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "%s",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1"
    }}' "$PLUGIN" "$COMMON/report" "${OMP_NUM_THREADS:-8}")" \
    -- "$@"
