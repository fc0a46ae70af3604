#!/bin/sh
# Runs decoders under libFuzzer: run.sh SECONDS [DECODER[,DECODER...]]. `make fuzz` calls it.
#
# Inputs that reach something new are kept in target/fuzz/corpus, for the next run. An input that a
# decoder stumbles over goes to the corpus of drumline-fuzz.
set -eu
seconds=$1 only=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
kept=$here/../corpus
target=$here/../../../target/fuzz

host=$(rustc -vV | sed -n 's/^host: //p')
coverage='-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=1'
# The same versions as everywhere else.
cp "$here/../../../Cargo.lock" "$here/Cargo.lock"
# With --target the flags are not for build scripts and macros.
RUSTUP_TOOLCHAIN=nightly RUSTFLAGS=$(echo $coverage) CARGO_TARGET_DIR=$target \
    cargo build --release --manifest-path "$here/Cargo.toml" --target "$host"

status=0
printf '%-14s %12s %6s %6s %8s\n' decoder executions cov ft findings
for folder in "$kept"/*/; do
    decoder=$(basename "$folder")
    case ",$only," in *,"$decoder",* | ,,) ;; *) continue ;; esac
    found=$target/corpus/$decoder log=$target/$decoder.log
    mkdir -p "$found"
    before=$(ls "$folder" | wc -l)
    DECODER=$decoder "$target/$host/release/drumline-fuzz-coverage" -max_total_time="$seconds" \
        -max_len=16384 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="$folder"found- "$found" "$folder" >"$log" 2>&1 || status=1
    findings=$(($(ls "$folder" | wc -l) - before))
    executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    reached=$(grep -a ' cov: ' "$log" | tail -1 | sed 's/.* cov: \([0-9]*\) ft: \([0-9]*\).*/\1 \2/')
    printf '%-14s %12s %6s %6s %8s\n' "$decoder" "${executions:-?}" ${reached:-? ?} "$findings"
    [ "$findings" = 0 ] || echo "    see $log"
done
exit $status
