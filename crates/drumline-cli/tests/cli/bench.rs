//! `drumline bench`, through the command line.

use std::{
    fs,
    process::{Command, Output},
};

use serde_json::Value;
use tempfile::TempDir;

const DRUMLINE: &str = env!("CARGO_BIN_EXE_drumline");

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(DRUMLINE);
    for name in ["RANK", "WORLD_SIZE", "RUST_LOG"] {
        command.env_remove(name);
    }
    command.args(arguments);
    command
}

fn bench(arguments: &str) -> Output {
    command(&["bench"]).args(arguments.split_whitespace()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn two_ranks_measure_print_and_keep() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (json, svg) = (path("speed.json"), path("speed.svg"));
    let measured = "all -b 64K -e 64K --iters 2 --rounds 2 --explain";
    let ways = "--transport shm,tcp --buffers all --calls all";
    let output = bench(&format!("{measured} {ways} --json {json} --svg {svg}"));
    assert!(output.status.success(), "{output:?}");
    let table = text(&output.stdout);
    assert!(table.contains("# wrong elements: 0 OK"), "{table}");
    assert!(table.contains("#   * shm-"), "{table}");

    let kept: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let rows = kept["rows"].as_array().unwrap();
    let printed = table.lines().filter(|line| !line.starts_with('#')).count();
    assert_eq!(printed, rows.len(), "{table}");
    let ways = |operation: &str| {
        let of = |row: &&Value| row["operation"] == operation;
        let way = |row: &Value| {
            ["transport", "buffers", "calls", "place"]
                .map(|key| row[key].as_str().unwrap().to_owned())
        };
        let mut ways: Vec<_> = rows.iter().filter(of).map(way).collect();
        ways.sort_unstable();
        ways
    };
    // Registered memory makes a difference only where ranks share memory.
    assert_eq!(ways("all_reduce").len(), (2 + 1) * 2 * 2);
    assert_eq!(ways("reduce").len(), (2 + 1) * 2, "in place alone");
    assert_eq!(ways("barrier").len(), 2 * 2);
    for row in rows {
        assert_eq!(row["wrong"], 0, "{row}");
        assert!(row["time_us"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["samples"], 4, "{row}");
        let is_barrier = row["operation"] == "barrier";
        assert_eq!(row["size"], if is_barrier { 0 } else { 65_536 }, "{row}");
        assert_eq!(row["bound_percent"].is_null(), is_barrier, "{row}");
    }
    assert!(fs::read_to_string(svg).unwrap().contains("all_reduce sum f32"));
}

#[test]
fn it_runs_under_a_launcher_too() {
    let once = "reduce_scatter -b 1K -e 1K --iters 1 --rounds 1 --untouched -d bf16 -o max";
    let program = [DRUMLINE, "bench"].into_iter().chain(once.split_whitespace());
    let output = command(&["run", "--nproc-per-node", "3"]).args(program).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let stdout = text(&output.stdout);
    assert!(
        stdout.contains("[0] # drumline bench") && stdout.contains("3 ranks on 1 host"),
        "{stdout}"
    );
    // 1 KiB is 512 elements; each rank gets 170 of them.
    assert!(
        stdout.contains("[0] reduce_scatter        1020        170       bf16     max"),
        "{stdout}"
    );
}

/// The algorithm needs registered buffers. The figures that ranks exchange between measurements are in
/// ordinary buffers, so for them the setting must not count.
#[test]
fn an_algorithm_that_was_asked_for_is_measured() {
    let once = "bench -b 4K -e 4K --iters 1 --rounds 1 --explain --place in --buffers registered";
    let output = command(&once.split_whitespace().collect::<Vec<_>>())
        .env("DRUMLINE_ALL_REDUCE", "shm-push")
        .output()
        .unwrap();
    let stdout = text(&output.stdout);
    assert!(output.status.success(), "{stdout}{}", text(&output.stderr));
    assert!(stdout.contains("shm-push: the settings name it"), "{stdout}");
}

#[test]
fn what_cannot_be_is_said_before_anything_is_started() {
    for (arguments, part) in [
        ("--root 7", "--root 7: there are 2 ranks"),
        ("--json /no/such/dir/x.json", "cannot write /no/such/dir/x.json"),
        ("all_gather -b 4 -e 4", "try a larger --max-bytes"),
    ] {
        let output = bench(arguments);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(part), "{arguments:?}: {stderr}");
    }
}
