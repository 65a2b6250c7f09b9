#!/bin/sh
# Builds what the tests run against, into ${KUBE_DATASTORE_TOOLS:-${XDG_CACHE_HOME:-~/.cache}/kube-datastore/tools}/bin:
#   versitygw and MinIO (S3 servers; Go), pjdfstest and fsx (file-system testers; Rust).
# A tool that is there at the right version is left alone. Each build is bounded; a tool that can't be built is one line
# on stderr, and the tier that needs it says so again: the exit code stays 0.
set -u
VERSITYGW=v1.8.0
MINIO=v0.0.0-20260212201848-7aac2a2c5b7c
PJDFSTEST=0.2.2
FSX=0.3.2
BUILD_TIMEOUT_S=1800

# Called by ourselves, under a time limit, with the folder to build in. MinIO's module can't be installed by version
# (its go.mod has replacements), but it can be required.
if [ "${1:-}" = in-minio-folder ]; then
    mkdir -p "$2/minio" && cd "$2/minio" &&
        printf '//go:build tools\n\npackage tools\n\nimport _ "github.com/minio/minio"\n' >tools.go &&
        go mod init tools && go get "github.com/minio/minio@$MINIO" && go mod tidy &&
        go build -trimpath -o "$2/bin/minio" github.com/minio/minio
    exit
fi

here=$(cd "$(dirname "$0")" && pwd)
tools=${KUBE_DATASTORE_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/kube-datastore/tools}
bin=$tools/bin
mkdir -p "$bin"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

# A Go binary carries the version of its main module as text.
go_version_is() { [ -x "$bin/$1" ] && grep -qaF "$(printf 'mod\t%s\t%s\t' "$2" "$3")" "$bin/$1"; }
program_says() { [ -x "$bin/$1" ] && [ "$("$bin/$1" --version 2>/dev/null)" = "$1 $2" ]; }

need() {
    command -v "$1" >/dev/null || "$here/../../.ci/apt" "$2"
    command -v "$1" >/dev/null || { echo "tools: $1 is missing, so $3 can't be built; install it ($2 on Debian)" >&2; return 1; }
}

# build NAME COMMAND...: runs the command and puts $scratch/bin/NAME in its place in one step.
build() {
    name=$1; shift
    echo "tools: building $name (some minutes the first time)"
    begun=$(date +%s)
    if timeout "$BUILD_TIMEOUT_S" "$@" >"$scratch/log" 2>&1 && mv -f "$scratch/bin/$name" "$bin/$name"; then
        echo "tools: $name built in $(($(date +%s) - begun)) s"
    else
        echo "tools: $name could not be built; the end of what the build said:" >&2
        tail -n 15 "$scratch/log" >&2
    fi
}

go_version_is versitygw github.com/versity/versitygw "$VERSITYGW" || { need go golang versitygw &&
    build versitygw env GOBIN="$scratch/bin" go install "github.com/versity/versitygw/cmd/versitygw@$VERSITYGW"; }
go_version_is minio github.com/minio/minio "$MINIO" || { need go golang MinIO && build minio "$here/build_tools.sh" in-minio-folder "$scratch"; }
for tool in "pjdfstest $PJDFSTEST" "fsx $FSX"; do
    # shellcheck disable=SC2086 # name and version
    set -- $tool
    # bookworm's cargo is too old; cargo-web is Debian's recent one.
    program_says "$1" "$2" || { need cargo cargo-web "$1" && need cc gcc "$1" &&
        build "$1" cargo install --quiet --locked --root "$scratch" --version "$2" "$1"; }
done
exit 0
