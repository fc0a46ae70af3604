//! A program of torch: its losses, and how much of a step its communication takes.

use std::io::Write;
use std::process::Command;

use anyhow::ensure;

use crate::Options;
use crate::left_out::LeftOut;

/// It is part of this program, so that one file is all that the machine with the GPU needs.
const PROGRAM: &str = include_str!("../torch_ddp.py");

/// Ends with what is missing, as its last line of errors.
const PROBE: &str = "
import sys
try:
    import torch, drumline
except Exception as error:
    sys.exit(f'{sys.executable}: {error}')
if sys.argv[1] == 'cuda' and not torch.cuda.is_available():
    sys.exit(f'torch {torch.__version__} of {sys.executable} finds no GPU')
";

/// Runs the program with two ranks, if there is a Python for it.
pub(crate) fn measure(options: &Options, left_out: &mut LeftOut) -> anyhow::Result<()> {
    let mut probe = Command::new(&options.python);
    let why = match probe.args(["-c", PROBE, &options.torch_device]).output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            Some(said.lines().last().unwrap_or("it says nothing").to_owned())
        }
        Err(error) => Some(format!("{}: {error}", options.python.display())),
    };
    if let Some(why) = why {
        let hint = "--python FILE names a Python with both: pip install torch, and drumline's wheel of make wheel";
        left_out.add("a program of torch", format!("{why} ({hint})"));
        return Ok(());
    }
    let mut program = tempfile::Builder::new().prefix("torch_ddp").suffix(".py").tempfile()?;
    program.write_all(PROGRAM.as_bytes())?;
    println!();
    let mut python = Command::new(&options.python);
    if let Some(library) = &options.library {
        python.env("DRUMLINE_CUDA_LIBRARY", library);
    }
    let rounds = options.rounds.to_string();
    let status = python
        .arg(program.path())
        .args(["--device", &options.torch_device, "--rounds", &rounds])
        .status()?;
    ensure!(status.success(), "the program of torch failed: {status}");
    Ok(())
}
