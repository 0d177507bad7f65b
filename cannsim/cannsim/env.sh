# source env.sh: run the official torch_npu wheel on the simulated CANN in this shell.
# Options are the CANNSIM_* variables of the README. Takes the build beside it, else asks `python3 -m cannsim build`.
_cannsim_root="$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")" && pwd)"
_cannsim_home="$_cannsim_root/build"
if [ ! -e "$_cannsim_home/key" ] && ! _cannsim_home="$(python3 -m cannsim build)"; then
    unset _cannsim_root _cannsim_home
    return 1 2>/dev/null || exit 1
fi
export CANNSIM_HOME="$_cannsim_home"
export ASCEND_HOME_PATH="$CANNSIM_HOME" ASCEND_TOOLKIT_HOME="$CANNSIM_HOME" ASCEND_OPP_PATH="$CANNSIM_HOME/opp"
export LAUNCH_COUNTER=cannsim
export LD_LIBRARY_PATH="$CANNSIM_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PATH="$_cannsim_root:$PATH"
if [ -e "$_cannsim_root/../pyproject.toml" ]; then
    export PYTHONPATH="$(dirname "$_cannsim_root")${PYTHONPATH:+:$PYTHONPATH}"
fi
export CANNSIM_STATE="${CANNSIM_STATE:-${TMPDIR:-/tmp}/cannsim-$(id -u)}"
unset TORCH_DEVICE_BACKEND_AUTOLOAD _cannsim_root _cannsim_home
