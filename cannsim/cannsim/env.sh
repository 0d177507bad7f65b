# source env.sh: run the official torch_npu wheel on the simulated CANN in this shell.
# Options are the CANNSIM_* variables of the README. Asks `python3 -m cannsim build` for the libraries, so that those of
# another torch are not taken; only where that fails (a python3 without torch), the build beside this file.
_cannsim_root="$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")" && pwd)"
if [ -e "$_cannsim_root/../pyproject.toml" ]; then
    export PYTHONPATH="$(dirname "$_cannsim_root")${PYTHONPATH:+:$PYTHONPATH}"
fi
if ! _cannsim_home="$(env -u CANNSIM_HOME python3 -m cannsim build)"; then
    _cannsim_home="$_cannsim_root/build"
    if [ ! -e "$_cannsim_home/key" ]; then
        unset _cannsim_root _cannsim_home
        return 1 2>/dev/null || exit 1
    fi
    echo "cannsim: $_cannsim_home is taken, which was built for $(cat "$_cannsim_home/key")" >&2
fi
export CANNSIM_HOME="$_cannsim_home"
export ASCEND_HOME_PATH="$CANNSIM_HOME" ASCEND_TOOLKIT_HOME="$CANNSIM_HOME" ASCEND_OPP_PATH="$CANNSIM_HOME/opp"
export LAUNCH_COUNTER=cannsim
export LD_LIBRARY_PATH="$CANNSIM_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PATH="$_cannsim_root:$PATH"
export CANNSIM_STATE="${CANNSIM_STATE:-${TMPDIR:-/tmp}/cannsim-$(id -u)}"
unset TORCH_DEVICE_BACKEND_AUTOLOAD _cannsim_root _cannsim_home
