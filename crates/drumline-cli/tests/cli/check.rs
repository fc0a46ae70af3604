//! `drumline check`, through the command line.

use std::{
    net::TcpListener,
    process::{Command, Output},
};

use serde_json::{Map, Value};

/// As on a machine without a GPU, whatever this one has.
const NO_GPU: (&str, &str) = ("DRUMLINE_CUDA_LIBRARY", "/no/libcuda.so");

fn check(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_drumline"))
        .arg("check")
        .args(arguments)
        .envs(variables.iter().copied())
        .env_remove("RUST_LOG")
        .output()
        .unwrap()
}

#[test]
fn everything_is_tried_everywhere() {
    let output = check(&["--json"], &[NO_GPU]);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["works"], true);
    assert!(report["host"]["cores"].as_u64().unwrap() > 0);
    assert_eq!(report["available"]["nccl"], false);
    let columns = report["backends"].as_array().unwrap();
    let transports: Vec<&str> =
        columns.iter().map(|column| column["transport"].as_str().unwrap()).collect();
    assert_eq!(transports, ["shm", "unix", "tcp", "", ""]);
    let (columns, on_gpu) = columns.split_at(columns.len() - 2);
    for cuda in on_gpu {
        assert_eq!((&cuda["device"], &cuda["operations"]), (&"cuda".into(), &Map::new().into()));
        let why = cuda["absent"].as_str().unwrap();
        assert!(why.contains("found no driver") && why.contains("/no/libcuda.so"), "{cuda}");
    }
    for column in columns.iter().filter(|column| column["absent"].is_null()) {
        let operations = column["operations"].as_object().unwrap();
        assert_eq!(operations.len(), 12);
        assert!(operations.values().all(|tried| tried["works"] == true), "{column}");
    }
    assert!(columns[1..].iter().all(|column| column["absent"].is_null()), "{report}");
}

#[test]
fn a_gpu_is_tried_as_well() {
    let library = drumline_standin::library();
    let library = library.to_str().unwrap();
    let both = [("DRUMLINE_CUDA_LIBRARY", library), ("DRUMLINE_NCCL_LIBRARY", library)];
    let output = check(&["--json"], &both);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let columns = report["backends"].as_array().unwrap();
    let [cuda, nccl] = &columns[columns.len() - 2..] else { unreachable!() };
    for (column, carrier) in [(cuda, "drumline"), (nccl, "nccl")] {
        assert_eq!((&column["device"], &column["absent"]), (&"cuda".into(), &Value::Null));
        assert_eq!(column["backend"], carrier);
        let operations = column["operations"].as_object().unwrap();
        assert_eq!(operations.len(), 12);
        assert!(operations.iter().all(|(_, tried)| tried["works"] == true), "{column}");
    }
}

#[test]
fn what_does_not_work_is_said_and_is_a_failure() {
    // Ranks that talk over TCP find no port.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let output = check(&[], &[("DRUMLINE_PORT_RANGE", &format!("{port}-{port}")), NO_GPU]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let row = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    let cells = |name: &str| -> Vec<String> {
        row(name)[name.len()..].split_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(cells("all_reduce")[1..], ["yes", "-", "-", "-"], "{text}");
    assert_eq!(cells("device"), ["cpu", "cpu", "cpu", "cuda", "cuda"]);
    assert!(row("drumline/cuda: ").contains("found no driver"), "{text}");
    assert!(row("drumline/tcp: ").contains(&port.to_string()), "{text}");
}

#[test]
fn a_setting_that_is_wrong_is_named() {
    let output = check(&[], &[("DRUMLINE_TIMEOUT_S", "soon")]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("DRUMLINE_TIMEOUT_S"), "{text}");
}
