//! `ten-steps TRANSPORT RANK URL DIRECTORY`: one of two ranks that train for ten steps and check every sum.
//! The program prints the digest of the trained parameters, or reports on stderr what failed and exits with
//! 1.

use std::{env, error::Error, io::Write as _, path::Path, process::ExitCode, time::Duration};

use drumline::{
    Config, DType, ProcessGroup,
    checkpoint::{Checkpoint, CheckpointDirectory, Tensor},
    ddp::{DdpOptions, GradientReducer, ParameterSpec},
    init_process_group,
    trace::Trace,
};

const WIDTH: usize = 5000;

fn main() -> ExitCode {
    // Errors in threads of the library appear only in the log.
    let log = tracing_subscriber::fmt().with_env_filter("warn,drumline_store=debug");
    log.with_writer(std::io::stderr).with_ansi(false).init();
    let arguments: Vec<String> = env::args().skip(1).collect();
    let told = match &arguments[..] {
        [transport, rank, url, directory] => train(transport, rank, url, Path::new(directory)),
        _ => Err("usage: ten-steps TRANSPORT RANK URL DIRECTORY".into()),
    };
    match told {
        Ok(digest) => {
            let told = writeln!(std::io::stdout(), "{digest:032x}");
            if told.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn train(transport: &str, rank: &str, url: &str, out: &Path) -> Result<u128, Box<dyn Error>> {
    mark();
    let mut config = Config::default().timeout(Duration::from_secs(5));
    match transport {
        "shm" => config = config.trace(Some(Trace::to(out.join("trace")))),
        "unix" => config = config.shared_memory(false),
        "tcp" => config = config.shared_memory(false).unix_sockets(false),
        other => return Err(format!("no transport is called {other}").into()),
    }
    let group = init_process_group(url, &config)?;
    let directory = CheckpointDirectory::new(out.join(format!("rank-{rank}")));
    directory.prepare()?;
    mark();
    let digest = steps(&group, &directory)?;
    group.destroy()?;
    Ok(digest)
}

/// Marks a point of the training for the tracer, by a system call that nothing else makes.
fn mark() {
    let _ = rustix::process::getpriority_process(None);
}

fn steps(group: &ProcessGroup, directory: &CheckpointDirectory) -> Result<u128, Box<dyn Error>> {
    let specs = vec![
        ParameterSpec::new("weight", [WIDTH], DType::F32),
        ParameterSpec::new("bias", [3], DType::F32),
    ];
    let reducer = GradientReducer::new(specs, &DdpOptions::default(), group)?;
    let mut weight = vec![0.0_f32; WIDTH];
    let mut bias = vec![0.0_f32; 3];
    let mut checkpoint = Checkpoint::default();
    for step in 1..=10_u64 {
        for (parameter, values) in [(1, &mut bias), (0, &mut weight)] {
            let gradient = |rank: usize| {
                move |place: usize| (place % 64) as f32 + (step as usize * (rank + 1)) as f32
            };
            let mine: Vec<f32> = (0..values.len()).map(gradient(group.rank())).collect();
            reducer.submit(parameter, mine[..].into());
        }
        let averaged = reducer.finish()?;
        for (parameter, values) in [(0, &mut weight), (1, &mut bias)] {
            let sums: &[f32] = averaged.get(parameter).ok_or("no gradient")?;
            for (place, (value, &sum)) in values.iter_mut().zip(sums).enumerate() {
                let expected = (place % 64) as f32 + step as f32 * 1.5;
                if sum != expected {
                    return Err(
                        format!("WRONG SUM in step {step}: {sum} instead of {expected}").into()
                    );
                }
                *value += sum;
            }
        }
        if step % 5 == 0 {
            checkpoint.insert(Tensor::from_values("weight", [WIDTH], &weight)?);
            checkpoint.insert(Tensor::from_values("bias", [3], &bias)?);
            checkpoint.metadata.insert("step".to_owned(), step.to_string());
            directory.save(step, &checkpoint)?;
        }
    }
    Ok(checkpoint.digest())
}
