#!/bin/bash
# Boot command of a ModelArts training job, with the image of deploy/docker/Dockerfile.ascend or a preset engine:
#     bash deploy/modelarts/boot.sh base --depth 20 --run d20
# The output folder of the job is where models go, so that a restarted job continues from its last checkpoint. Nodes and
# cards come from ModelArts' own variables; on preset engines, which start this once per card, one copy works.
set -eo pipefail
if [ $# -eq 0 ]; then
    echo "name the command: bash $0 base --depth 20 --run d20" >&2
    exit 2
fi
for folder in /usr/local/Ascend/ascend-toolkit /home/ma-user/Ascend/ascend-toolkit; do
    [ -f "$folder/set_env.sh" ] && source "$folder/set_env.sh" && break
done
set -u  # not before: CANN's script reads variables that may not be set
export ASCENDCHAT_HOME=${ASCENDCHAT_HOME:-${MA_JOB_DIR:-$HOME}/ascendchat}
command -v ascendchat >/dev/null || pip install -e "$(dirname "$0")/../.."
exec ascendchat launch --max-restarts 3 "$@"
