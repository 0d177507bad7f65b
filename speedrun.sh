#!/usr/bin/env bash
# From raw text to a chat model, as the guides call it; it is `ascendchat speedrun` with the recipe for these devices.
#     bash speedrun.sh
#     RECIPE=d12-910b-4 bash speedrun.sh --dry-run
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -z "${RECIPE:-}" ]; then
    if [ -e /dev/davinci0 ]; then
        RECIPE=d20-910b-8
    elif command -v nvidia-smi >/dev/null; then
        RECIPE=d20-h100-8
    else
        RECIPE=tiny-cpu
    fi
fi
python="$here/.venv/bin/python"
[ -x "$python" ] || python=python3
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"  # no `cd`: --sets DIR and RECIPE=my.yaml are seen from here
exec "$python" -m ascendchat speedrun --recipe "$RECIPE" "$@"
