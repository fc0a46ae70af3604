//! The program, on a stand-in for a driver: it is right there, and how fast it says that it is means nothing.

use std::process::Command;

#[test]
fn it_tries_a_device_and_says_what_it_left_out() {
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-check"))
        .env("DRUMLINE_CUDA_LIBRARY", drumline_standin::library())
        .env("DRUMLINE_NCCL_LIBRARY", drumline_standin::library())
        .args(["--bytes-max", "65536", "--rounds", "2", "--ranks", "1,2"])
        .output()
        .unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    assert!(output.status.success(), "{out}{err}");
    for part in [
        "cuda:0 (Stand-in 0",
        "64 KiB",
        "all_reduce of f32 by processes",
        "46 gradients by name",
        "by nccl ",
        "left out: ",
    ] {
        assert!(out.contains(part), "{out}");
    }
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
