#!/bin/sh
# Makes what the test cluster runs, into ${KUBE_DATASTORE_TOOLS:-${XDG_CACHE_HOME:-~/.cache}/kube-datastore/tools}:
#   bin/kube (etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy and kubectl in one),
#   bin/coredns, bin/csi-sanity, bin/helm, bin/pause: built by Go from go/ beside this file; with the argument `external`
#   also bin/e2e.test and bin/agnhost, Kubernetes' own tests of storage drivers;
#   node/: Debian's containerd, runc and network plugins, unpacked. They are not installed: that would start services,
#   and would drive out another containerd.
# What is there and was made from the same sources is left alone. Each build is bounded; what can't be made is one line on
# stderr, and the tier that needs it says so again: the exit code stays 0.
set -u
KUBE=1.35.4
BUILD_TIMEOUT_S=2700
DEBS="containerd runc containernetworking-plugins"

external=${1:-}
here=$(cd "$(dirname "$0")" && pwd)
tools=${KUBE_DATASTORE_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/kube-datastore/tools}
bin=$tools/bin
stamps=$tools/stamps
mkdir -p "$bin" "$stamps"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
# Two builds at once would only slow each other.
exec 9>"$stamps/lock" && flock 9

"$here/../../.ci/apt" iproute2 nftables libseccomp2 mmdebstrap buildah

need() {
    command -v "$1" >/dev/null || "$here/../../.ci/apt" "$2"
    command -v "$1" >/dev/null || { echo "cluster: $1 is missing, so $3 can't be built; install it ($2 on Debian)" >&2; return 1; }
}

# made NAME HOW FILE...: whether NAME was made in this way from these sources; leaves the hash of both in $hash.
made() {
    name=$1 how=$2; shift 2
    hash=$({ echo "$how"; cat "$@"; } | sha256sum)
    [ -e "$stamps/$name" ] && [ "$(cat "$stamps/$name")" = "$hash" ]
}

# build NAME PACKAGE LDFLAGS [FOLDER [VERB]]: one program from go/FOLDER (NAME), by `go VERB` (build).
build() {
    name=$1 package=$2 flags=$3 folder=${4:-$1} verb=${5:-build}
    if made "$name" "$package $flags" "$here/go/$folder"/*.* && [ -x "$bin/$name" ]; then return; fi
    need go golang "$name" || return
    echo "cluster: building $name (kube takes about ten minutes the first time)"
    begun=$(date +%s)
    # shellcheck disable=SC2086 # the verb may have an option
    if (cd "$here/go/$folder" && CGO_ENABLED=0 timeout "$BUILD_TIMEOUT_S" nice -n 5 \
        go $verb -mod=readonly -buildvcs=false -trimpath -ldflags "-s -w $flags" -o "$scratch/$name" "$package") >"$scratch/log" 2>&1 &&
        mv -f "$scratch/$name" "$bin/$name"; then
        echo "$hash" >"$stamps/$name"
        echo "cluster: $name built in $(($(date +%s) - begun)) s"
    else
        echo "cluster: $name could not be built; the end of what the build said:" >&2
        tail -n 15 "$scratch/log" >&2
    fi
}

# apt's own download user can't write into a folder of root's.
download() { apt-get -qq -o APT::Sandbox::User=root download "$@"; }

unpack() {
    if made node "$DEBS" /etc/os-release && [ -x "$tools/node/usr/bin/containerd" ]; then return; fi
    command -v apt-get >/dev/null || { echo "cluster: this is not Debian; unpack $DEBS into $tools/node by hand" >&2; return; }
    mkdir "$scratch/debs.d" "$scratch/node"
    # shellcheck disable=SC2086 # several names
    if (cd "$scratch/debs.d" && { download $DEBS || { apt-get -qq update && download $DEBS; }; }) >"$scratch/log" 2>&1; then
        for deb in "$scratch/debs.d"/*.deb; do dpkg -x "$deb" "$scratch/node"; done
        rm -rf "$tools/node" && mv "$scratch/node" "$tools/node" && echo "$hash" >"$stamps/node"
        echo "cluster: unpacked $DEBS"
    else
        echo "cluster: apt-get could not download $DEBS:" >&2
        tail -n 5 "$scratch/log" >&2
    fi
}

# Kubernetes learns its version from the linker; otherwise it calls itself v0.0.0.
component=k8s.io/component-base/version
set -- "-X $component.gitVersion=v$KUBE" "-X $component.gitMajor=${KUBE%%.*}" "-X $component.gitMinor=$(echo $KUBE | cut -d. -f2)" \
    "-X $component.gitTreeState=clean" "-X k8s.io/client-go/pkg/version.gitVersion=v$KUBE"
unpack
build pause . ""
build csi-sanity github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity ""
build coredns . ""
kubernetes=$*
build kube . "$kubernetes"
# After Kubernetes: half of its packages are the same, and compiled then.
build helm helm.sh/helm/v3/cmd/helm ""
# Kubernetes' own suite for storage drivers, and the program of its pods: for `make long` only.
if [ -n "$external" ]; then
    build e2e.test . "$kubernetes" e2e "test -c"
    build agnhost k8s.io/kubernetes/test/images/agnhost "" e2e
fi
if [ -x "$bin/kube" ]; then
    for name in etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl; do
        ln -sfn kube "$bin/$name"
    done
fi
exit 0
