//! The program, on a stand-in for a driver: it is right there, and how fast it says that it is means nothing.

#![allow(clippy::unwrap_used)]

use std::process::Command;

/// The program on the stand-in, with little to do.
fn program() -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_gpu-check"));
    program
        .env("DRUMLINE_CUDA_LIBRARY", drumline_standin::library())
        .env("DRUMLINE_NCCL_LIBRARY", drumline_standin::library())
        .env_remove("NCCL_MULTI_RANK_GPU_ENABLE")
        .env_remove("NCCL_HOSTID")
        .args(["--bytes-max", "65536", "--rounds", "2", "--ranks", "1,2"])
        .args(["--python", "/no/python3"]);
    program
}

/// What it prints.
fn out_of(program: &mut Command) -> String {
    let output = program.output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    assert!(output.status.success(), "{out}{err}");
    out
}

/// The cells of the rows behind a headline.
fn rows<'a>(out: &'a str, headline: &str) -> Vec<Vec<&'a str>> {
    let lines = out.lines().skip_while(|line| !line.starts_with(headline)).skip(2);
    lines.take_while(|line| !line.is_empty()).map(|it| it.split_whitespace().collect()).collect()
}

/// What it has left out.
fn left_out(out: &str) -> Vec<&str> {
    out.lines().filter_map(|line| line.strip_prefix("left out: ")).collect()
}

#[test]
fn it_tries_a_device_and_says_what_it_left_out() {
    // Three ranks share two GPUs over NCCL: this version wants a word for each host, and the program sets it.
    let out = out_of(&mut program());
    for part in [
        "cuda:0 (Stand-in 0",
        "64 KiB",
        "all_reduce of f32 by processes",
        "46 gradients by name",
        "by nccl ",
    ] {
        assert!(out.contains(part), "{out}");
    }
    let copies = rows(&out, "copies, GB/s");
    assert_eq!(copies.len(), 3, "{out}");
    for row in copies {
        // The size has two words; then come eight ways of the host, and the way between processes.
        assert!(row[10].parse::<f64>().is_ok_and(|gb_s| gb_s >= 0.0), "{row:?}");
    }

    let killed: Vec<String> =
        rows(&out, "a rank is killed").iter().map(|it| it[..4].join(" ")).collect();
    assert_eq!(
        killed,
        ["2 host rank 0", "3 host rank 1", "2 nccl rank 0", "3 nccl rank 1"],
        "{out}"
    );

    let left_out = left_out(&out);
    let burn =
        if cfg!(feature = "burn") { "a program of burn on CUDA: " } else { "a program of burn: " };
    assert_eq!(left_out.len(), 2, "{left_out:?}");
    assert!(left_out[0].starts_with("a program of torch: /no/python3: "), "{left_out:?}");
    assert!(left_out[1].starts_with(burn), "{left_out:?}");
}

#[test]
fn what_a_machine_does_not_have_is_left_out_with_the_reason() {
    let out = out_of(
        program().env("STANDIN_NO_IPC", "1").env("DRUMLINE_NCCL_LIBRARY", "/no/libnccl.so.2"),
    );
    assert_eq!(rows(&out, "copies, GB/s")[0][10], "-", "{out}");
    let left_out = left_out(&out);
    assert!(
        left_out[0].contains("CUDA IPC") && left_out[0].contains("CUDA_ERROR_NOT_SUPPORTED"),
        "{out}"
    );
    let of_nccl: Vec<_> = left_out.iter().filter(|it| it.contains("/no/libnccl.so.2")).collect();
    assert_eq!(of_nccl.len(), 4, "two without a death, and two with one: {left_out:?}");
    assert_eq!(rows(&out, "a rank is killed").len(), 2, "through the host: {out}");
}

#[cfg(feature = "burn")]
#[test]
fn ranks_that_train_with_burn_have_the_parameters_of_one_process() {
    let out = out_of(&mut program());
    assert!(out.contains("after 20 steps the bits of all ranks are equal"), "{out}");
}

#[test]
fn without_a_driver_it_says_what_it_has_tried() {
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-check"))
        .args(["--library", "/no/libcuda.so.1"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(text.contains("nothing to try") && text.contains("/no/libcuda.so.1"), "{text}");
}
