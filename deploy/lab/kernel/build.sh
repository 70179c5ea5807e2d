#!/bin/sh
# Builds the lab's kernel, out/lab/vmlinux, from Debian's linux-source-6.1.
#
#   deploy/lab/kernel/build.sh [--config-only]
#
# It takes 22 minutes of CPU and needs
#   apt-get install linux-source-6.1 gcc-mips-linux-gnu flex bison bc libelf-dev
# The image is kept in ~/.cache/cakefleet/lab by what it was made of, so that a
# second checkout does not build it again. JOBS=N compiles N files at a time.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
out=$(cd "$here/../../.." && pwd)/out/lab
tarball=${LINUX_SOURCE:-/usr/src/linux-source-6.1.tar.xz}
cross=${CROSS_COMPILE:-mips-linux-gnu-}

if ! [ -e "$tarball" ]; then
    echo "build.sh: $tarball is missing: apt-get install linux-source-6.1" >&2
    exit 1
fi
for tool in "${cross}gcc" flex bison bc make patch xz; do
    if ! command -v "$tool" >/dev/null; then
        echo "build.sh: $tool is missing: apt-get install gcc-mips-linux-gnu flex bison bc make patch xz-utils" >&2
        exit 1
    fi
done

made_of=$(cat "$tarball" "$here/lab.config" "$here/malta.patch" "$here/build.sh" | sha256sum | cut -c1-16)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cakefleet/lab
image=$cache/vmlinux-$made_of
mkdir -p "$out" "$cache"
if [ -e "$image" ] && [ "${1-}" != --config-only ]; then
    cp "$image" "$out/vmlinux"
    echo "out/lab/vmlinux: from $image"
    exit
fi

work=${WORK:-$out/linux}
source=$work/linux-source-6.1
mkdir -p "$work/build"
if ! [ -e "$source/patched" ]; then
    rm -rf "$source"
    tar -xf "$tarball" -C "$work"
    patch -d "$source" -p1 <"$here/malta.patch"
    touch "$source/patched"
fi
# The same source makes the same image.
export KBUILD_BUILD_TIMESTAMP='Thu Jan  1 00:00:00 UTC 2026' KBUILD_BUILD_USER=lab KBUILD_BUILD_HOST=lab
make_kernel() { make -C "$source" O="$work/build" ARCH=mips CROSS_COMPILE="$cross" "$@"; }

make_kernel KCONFIG_ALLCONFIG="$here/lab.config" allnoconfig >/dev/null
# A setting that this kernel doesn't take is an error, not a surprise.
missing=$(grep -E '^CONFIG_[A-Z0-9_]+=y' "$here/lab.config" | grep -Fxv -f "$work/build/.config" || true)
if [ -n "$missing" ]; then
    echo "build.sh: this kernel does not take:" >&2
    echo "$missing" >&2
    exit 1
fi
if [ "${1-}" = --config-only ]; then
    exit
fi
make_kernel -j"${JOBS:-$(nproc)}" vmlinux
"${cross}strip" -s -o "$out/vmlinux.new" "$work/build/vmlinux"
cp "$out/vmlinux.new" "$image"
mv "$out/vmlinux.new" "$out/vmlinux"
echo "out/lab/vmlinux: built; $work can be removed"
