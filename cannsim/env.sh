# source cannsim/env.sh: run the official torch_npu wheel on the simulated CANN in this shell.
# Options are the CANNSIM_* variables of cannsim/README.md; build first with `make cannsim`.
_cannsim_root="$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")" && pwd)"
if [ ! -e "$_cannsim_root/build/lib64/libopapi.so" ]; then
    echo "cannsim is not built: type 'make cannsim' first" >&2
    unset _cannsim_root
    return 1 2>/dev/null || exit 1
fi
export CANNSIM_HOME="$_cannsim_root/build"
export ASCEND_HOME_PATH="$CANNSIM_HOME" ASCEND_TOOLKIT_HOME="$CANNSIM_HOME" ASCEND_OPP_PATH="$CANNSIM_HOME/opp"
export LAUNCH_COUNTER=cannsim
export LD_LIBRARY_PATH="$CANNSIM_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PATH="$_cannsim_root:$PATH"
export PYTHONPATH="$(dirname "$_cannsim_root")${PYTHONPATH:+:$PYTHONPATH}"
export CANNSIM_STATE="${CANNSIM_STATE:-${TMPDIR:-/tmp}/cannsim-$(id -u)}"
unset TORCH_DEVICE_BACKEND_AUTOLOAD _cannsim_root
