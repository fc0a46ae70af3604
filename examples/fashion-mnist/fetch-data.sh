#!/bin/sh
# Gets Fashion-MNIST, all 70,000 images, from Debian's package dataset-fashion-mnist (31 MB, MIT
# licence), and prints the directory where it is. Needs apt, but neither root nor an installation.
# Where it cannot be had, prints the directory of the handwritten digits beside this script.
#
# The images are kept in ${XDG_CACHE_HOME:-~/.cache}/drumline/fashion-mnist; delete that to get
# them anew.
set -eu

package=dataset-fashion-mnist
fallback=$(cd "$(dirname "$0")/data" && pwd)

use_fallback() {
    echo "fetch-data.sh: $1; using the handwritten digits in $fallback" >&2
    echo "$fallback"
    exit 0
}

cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
[ -n "$cache" ] || use_fallback "neither HOME nor XDG_CACHE_HOME is set"
target=$cache/drumline/fashion-mnist

if [ -d "$target" ]; then
    echo "$target"
    exit 0
fi

for tool in apt-get dpkg-deb; do
    command -v $tool >/dev/null || use_fallback "there is no $tool to get $package with"
done
mkdir -p "$cache/drumline" 2>/dev/null || use_fallback "cannot write to $cache"
work=$(mktemp -d "$cache/drumline/fetch.XXXXXX") || use_fallback "cannot write to $cache"
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
log=$work/log

apt_get() {
    # The sandbox user may not enter a directory of ours; apt checks hashes and signatures anyway.
    (cd "$work" && apt-get -qq -o APT::Sandbox::User=root -o Acquire::Retries=1 \
        -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 "$@") >>"$log" 2>&1
}

echo "fetch-data.sh: getting $package (31 MB)" >&2
if ! apt_get download $package; then
    # The system's package lists are empty or old. Make some of our own.
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    set -- -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache"
    apt_get "$@" update || true # One bad source of many is no reason to give up.
    if ! apt_get "$@" download $package; then
        cat "$log" >&2
        use_fallback "apt-get could not download $package"
    fi
fi

mkdir "$work/root"
dpkg-deb -x "$work/$package"_*.deb "$work/root" || use_fallback "$package cannot be unpacked"
images=$work/root/usr/share/datasets/fashion-mnist
[ -f "$images/train-images-idx3-ubyte.gz" ] || use_fallback "$package has no images in it"
cp "$work/root/usr/share/doc/$package/copyright" "$images/"
# Complete or not there at all. If another process was faster, its directory is as good.
mv -T "$images" "$target" 2>/dev/null || [ -d "$target" ]
echo "$target"
