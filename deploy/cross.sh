#!/bin/sh
# Builds the agent for every kind of router and the other programs for servers,
# into bin/OS-ARCH/. `make cross` passes BUILD and AGENT_TAGS.
set -eu

overlay=$(mktemp -d)
trap 'rm -rf "$overlay"' EXIT
deploy/mips-overlay.sh "$overlay"

# agent ARCH [NAME=VALUE] [flag...]: one build of the agent.
agent() {
	arch=$1
	variant=$2
	shift 2
	env GOOS=linux GOARCH="$arch" ${variant:+"$variant"} \
		sh -c "$BUILD \"\$@\"" sh -o "bin/linux-$arch/" -tags "$AGENT_TAGS" "$@" ./cmd/cakefleet-agent
	ls -l "bin/linux-$arch/cakefleet-agent" | awk '{ printf "%s %.1f MB\n", $NF, $5 / 1e6 }'
}

agent mips GOMIPS=softfloat -overlay "$overlay/overlay.json"
agent mipsle GOMIPS=softfloat -overlay "$overlay/overlay.json"
agent mips64 GOMIPS64=softfloat
agent mips64le GOMIPS64=softfloat
agent arm GOARM=5
agent arm64 ''
agent amd64 ''

for arch in amd64 arm64; do
	env GOOS=linux GOARCH=$arch sh -c "$BUILD -o bin/linux-$arch/ ./cmd/cakefleet-controller ./cmd/cakefleetctl"
done
