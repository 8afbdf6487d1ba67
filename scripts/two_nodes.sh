#!/usr/bin/env bash
# Trains on two "nodes" of this machine: network namespaces that a pair of virtual Ethernet interfaces joins.
#
#   scripts/two_nodes.sh [--rate 1gbit] [--per-node 2] WHAT TORCHRUN TAKES
#   scripts/two_nodes.sh --rate 1gbit -m fp8booster train --model tiny --steps 20 --out runs/two-nodes
#
# --rate limits what each interface sends, --per-node is how many processes a node starts (1); "2,1" gives the second
# another number. Says at the end what each interface sent. Ends with 77 where namespaces are not permitted, else with the status of the node that failed first.
set -euo pipefail

rate=
per_node=1
while [ $# -gt 0 ]; do
  case $1 in
    --rate) rate=$2; shift 2 ;;
    --per-node) per_node=$2; shift 2 ;;
    *) break ;;
  esac
done
processes_of=("${per_node%,*}" "${per_node#*,}")
[ $# -gt 0 ] || { echo "error: give what torchrun shall start, such as -m fp8booster train" >&2; exit 2; }
for tool in ip ${rate:+tc} torchrun; do
  command -v "$tool" >/dev/null || { echo "cannot run here: $tool is not installed" >&2; exit 77; }
done

nodes=("fp8-$$-0" "fp8-$$-1")
address=(10.77.0.1 10.77.0.2) # seen in the namespaces alone
processes=()

clean_up() {
  for process in "${processes[@]}"; do kill "$process" 2>/dev/null || true; done
  wait 2>/dev/null || true
  for node in "${nodes[@]}"; do ip netns delete "$node" 2>/dev/null || true; done # its interface goes with it
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

lay_out() {
  ip netns add "${nodes[0]}" && ip netns add "${nodes[1]}" &&
    ip -n "${nodes[0]}" link add eth0 type veth peer name eth0 netns "${nodes[1]}"
}
lay_out 2>/dev/null || {
  echo "cannot run here: network namespaces take root, or the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN" >&2
  exit 77
}
for number in 0 1; do
  node=${nodes[$number]}
  ip -n "$node" address add "${address[$number]}/24" dev eth0
  ip -n "$node" link set lo up
  ip -n "$node" link set eth0 up
  # a bucket of tokens: bursts of 1 MB, and up to 100 ms in the queue
  [ -z "$rate" ] || ip netns exec "$node" tc qdisc add dev eth0 root tbf rate "$rate" burst 1mb latency 100ms
done

for number in 0 1; do
  is_host=$([ "$number" = 0 ] && echo true || echo false)
  GLOO_SOCKET_IFNAME=eth0 ip netns exec "${nodes[$number]}" torchrun \
    --nnodes 2 --nproc-per-node "${processes_of[$number]}" --local-addr "${address[$number]}" \
    --rdzv-id two-nodes --rdzv-backend c10d --rdzv-endpoint "${address[0]}:29500" --rdzv-conf "is_host=$is_host" \
    "$@" &
  processes+=($!)
done
status=0
for _ in 0 1; do
  wait -n || { status=$?; break; } # the other node would wait for this one
done
for number in 0 1; do
  sent=$(ip netns exec "${nodes[$number]}" cat /sys/class/net/eth0/statistics/tx_bytes)
  echo "node $number sent $sent bytes"
done
exit "$status"
