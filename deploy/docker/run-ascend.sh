#!/bin/bash
# Runs a command in the container of Dockerfile.ascend, with the NPUs of this machine.
#     deploy/docker/run-ascend.sh ascendchat doctor
#     DEVICES=0,1 deploy/docker/run-ascend.sh ascendchat launch --devices 2 base --depth 12
#     PRINT=1 deploy/docker/run-ascend.sh ...            # only show the docker command
# IMAGE names another image, DATA the folder or volume for models and data. A card can belong to one container at a time.
set -euo pipefail

image=${IMAGE:-ascendchat:ascend}
data=${DATA:-ascendchat}
devices=${DEVICES:-$({ ls /dev/davinci[0-9]* 2>/dev/null || true; } | sed 's|/dev/davinci||' | sort -n | paste -sd, -)}
if [ -z "$devices" ]; then
    echo "no /dev/davinci* on this machine: is the driver installed? (npu-smi info)" >&2
    exit 2
fi

flags=(--rm --ipc=host --net=host -v "$data:/data")  # HCCL talks over the host's network and shared memory
[ -t 0 ] && flags+=(-it)
for number in ${devices//,/ }; do
    flags+=(--device "/dev/davinci$number")
done
for device in davinci_manager devmm_svm hisi_hdc; do
    flags+=(--device "/dev/$device")
done
for path in /usr/local/dcmi /usr/local/bin/npu-smi /usr/local/Ascend/driver/lib64 \
    /usr/local/Ascend/driver/version.info /etc/ascend_install.info /etc/hccn.conf; do
    [ -e "$path" ] && flags+=(-v "$path:$path:ro")
done

command=(docker run "${flags[@]}" "$image" "$@")
if [ -n "${PRINT:-}" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
