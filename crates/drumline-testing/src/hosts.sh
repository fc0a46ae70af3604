#!/bin/sh
# hosts.sh COUNT FAMILY [DIRECTORY]...: hosts on this machine, for tests of several hosts.
#
# Each has its own network, name, processes, memory (/dev/shm, System V) and /tmp. Below /tmp the hosts see only the
# given directories. FAMILY is 4 or 6: the addresses 198.18.0.1, 198.18.0.2, ... (which are for tests of networks) or
# fd00::1, fd00::2, ... at `eth0`, on one bridge, where the default route ends. With 6 there is no IPv4, not even on
# loopback. Host N is named hostN, and takes its own name for loopback, as Debian's hosts do.
#
# Prints the process ids of the bridge's namespaces and of each host's, in one line; `nsenter --target` leads there. All
# is over when stdin ends. Takes root and iproute2.
set -e
count=$1 family=$2
shift 2

place=$(mktemp -d)
mkfifo "$place/ready"
exec 3<>"$place/ready"
rm -r "$place"

# The end of `unshare` ends its child, and that of the first process of a host all others.
makers=
trap 'kill -KILL $makers 2>/dev/null' EXIT

# Waits until the last `unshare` has made its namespaces, and says which process is the first there.
made() {
    makers="$makers $!"
    read -r _ <&3
    # The list ends without a line feed.
    read -r pid _ <"/proc/$!/task/$!/children" || [ -n "$pid" ]
}

unshare --net --fork --kill-child sh -c 'echo >&3; exec sleep infinity 3>&-' </dev/null >/dev/null &
made
switch=$pid
at_switch() { nsenter --target "$switch" --net "$@"; }
at_switch ip link add bridge type bridge forward_delay 0
at_switch ip link set bridge up

address() {
    case $family in 4) echo "198.18.0.$1" ;; 6) printf 'fd00::%x\n' "$1" ;; esac
}
names() {
    case $family in 4) echo 127.0.0.1 localhost; echo "127.0.1.1 host$1" ;; 6) echo "::1 localhost host$1" ;; esac
    for other in $(seq 0 $((count - 1))); do
        [ "$other" = "$1" ] || echo "$(address $((other + 1))) host$other"
    done
}

pids=$switch
for host in $(seq 0 $((count - 1))); do
    # shellcheck disable=SC2016 # for the shell on the host
    NAMES=$(names "$host") unshare --net --uts --ipc --pid --mount --fork --kill-child --mount-proc sh -ec '
        hostname "$0"
        mount -t tmpfs -o mode=1777 tmpfs /dev/shm
        for directory; do
            case $directory in
            /tmp/*) mkdir -p "/dev/shm/${directory#/tmp/}"; mount --bind "$directory" "/dev/shm/${directory#/tmp/}" ;;
            esac
        done
        mount --rbind /dev/shm /tmp
        mount -t tmpfs -o mode=1777 tmpfs /dev/shm
        echo "$NAMES" >/tmp/names
        mount --bind /tmp/names /etc/hosts
        rm /tmp/names
        echo >&3
        exec sleep infinity 3>&-
    ' "host$host" "$@" </dev/null >/dev/null &
    made
    pids="$pids $pid"
    on_host() { nsenter --target "$pid" --net "$@"; }
    at_switch ip link add "port$host" type veth peer name eth0 netns "$pid"
    at_switch ip link set "port$host" master bridge up
    on_host ip link set lo up
    on_host ip link set eth0 up
    case $family in
    4) on_host ip addr add "$(address $((host + 1)))/24" dev eth0 ;;
    6)
        on_host ip addr add "$(address $((host + 1)))/64" dev eth0 nodad
        on_host ip -4 addr flush dev lo
        ;;
    esac
    on_host ip "-$family" route add default dev eth0
done
exec 3>&-
echo "$pids"
cat >/dev/null
