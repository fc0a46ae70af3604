//! Feeds the decoders with random changes of the corpus for a given time. See `--help`.
//!
//! Each decoder runs in a process of its own, which catches panics. Before each input the process writes the
//! input to a file. So the input is known even if it ends the process (by an abort or a stack overflow) or
//! makes it hang.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use drumline_fuzz::{
    DECODERS, Decoder, Verdict, check, corpus,
    random::{Inputs, attempt},
    record::record,
};

#[derive(Debug, Parser)]
#[command(about = "Feeds every decoder with random changes of the bytes in its corpus")]
struct Options {
    /// For how long, all decoders together
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    /// Only these decoders, with commas between them
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// The same seed gives the same inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Record the beginning of the corpus anew, and feed nothing
    #[arg(long)]
    record: bool,
    /// Feed this file of the corpus, and nothing else
    #[arg(long)]
    replay: Option<PathBuf>,
    /// Feed one decoder in this process, and write each input to this file first
    #[arg(long, hide = true)]
    last_input: Option<PathBuf>,
}

/// Time limit for one input, which usually takes microseconds.
const INPUT_MAX: Duration = Duration::from_secs(10);

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    if let Some(file) = &options.replay {
        let folder = file.parent().and_then(Path::file_name).unwrap_or_default();
        let decoder = chosen(&[folder.to_string_lossy().into_owned()])?[0];
        println!("{:?}", check(decoder, &fs::read(file)?));
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = chosen(&options.only)?;
    if options.record {
        chosen.iter().try_for_each(|decoder| record(decoder))?;
        return Ok(ExitCode::SUCCESS);
    }
    let share = options.seconds / chosen.len() as f64;
    if let (Some(file), [decoder]) = (&options.last_input, &chosen[..]) {
        return feed(decoder, options.seed, share, file);
    }
    println!("{:<14} {:>10} {:>9} {:>8}", "decoder", "executions", "taken", "findings");
    let mut is_clean = true;
    for decoder in chosen {
        is_clean &= run(decoder, options.seed, share)?;
    }
    Ok(if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn chosen(only: &[String]) -> Result<Vec<&'static Decoder>> {
    if let Some(unknown) = only.iter().find(|name| DECODERS.iter().all(|it| it.name != **name)) {
        let names: Vec<_> = DECODERS.iter().map(|decoder| decoder.name).collect();
        bail!("{unknown} is no decoder; there are {}", names.join(", "));
    }
    let is_chosen =
        |decoder: &&Decoder| only.is_empty() || only.iter().any(|it| it == decoder.name);
    Ok(DECODERS.iter().filter(is_chosen).collect())
}

/// Feeds a decoder in another process. Returns whether the process found nothing.
fn run(decoder: &Decoder, seed: u64, seconds: f64) -> Result<bool> {
    let directory = tempfile::tempdir()?;
    let last_input = directory.path().join("last-input");
    let mut command = Command::new(env::current_exe()?);
    command.args(["--only", decoder.name, "--seed", &seed.to_string()]);
    command.args(["--seconds", &seconds.to_string()]).arg("--last-input").arg(&last_input);
    let mut child = command.spawn().context("cannot start another process")?;
    match wait(&mut child, &last_input, seconds)? {
        Ended::Exit(0) => Ok(true),
        Ended::Exit(code) if code == FOUND => Ok(false),
        ended => {
            let input = fs::read(&last_input).context("it ended before its first input")?;
            let path = corpus::keep(decoder, &input)?;
            println!("{:<14} {ended:?} on {}", decoder.name, path.display());
            Ok(false)
        }
    }
}

/// How a process ended.
#[derive(Debug)]
enum Ended {
    Exit(i32),
    Killed,
    Hang,
}

/// The exit code of a process that has found something and gone on.
const FOUND: i32 = 3;

fn wait(child: &mut Child, last_input: &Path, seconds: f64) -> Result<Ended> {
    let deadline = Instant::now() + Duration::from_secs_f64(seconds) + INPUT_MAX;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.code().map_or(Ended::Killed, Ended::Exit));
        }
        let age = fs::metadata(last_input).ok().and_then(|it| it.modified().ok()?.elapsed().ok());
        if age.is_some_and(|age| age > INPUT_MAX) || Instant::now() > deadline + INPUT_MAX {
            child.kill()?;
            child.wait()?;
            return Ok(Ended::Hang);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Feeds a decoder in this process.
fn feed(decoder: &Decoder, seed: u64, seconds: f64, last_input: &Path) -> Result<ExitCode> {
    std::panic::set_hook(Box::new(|_| {}));
    let (start, limit) = (Instant::now(), Duration::from_secs_f64(seconds));
    let mut inputs = Inputs::new(decoder, seed)?;
    let (mut executions, mut taken, mut findings) = (0_u64, 0_u64, BTreeSet::new());
    while start.elapsed() < limit {
        let input = inputs.next_input();
        fs::write(last_input, &input)?;
        executions += 1;
        match attempt(decoder, &input) {
            Ok(Verdict::Taken) => {
                taken += 1;
                inputs.taken(input);
            }
            Ok(Verdict::Refused) => {}
            // Keep one input for each kind of finding. Texts that differ only in numbers are of one kind.
            Err(text) => {
                let kind: String = text.chars().filter(|c| c.is_alphabetic()).take(60).collect();
                if findings.insert(kind) {
                    let path = corpus::keep(decoder, &input)?;
                    let shown: String = text.chars().take(300).collect();
                    println!("{}: {shown}\n    {}", decoder.name, path.display());
                }
            }
        }
    }
    println!("{:<14} {executions:>10} {taken:>9} {:>8}", decoder.name, findings.len());
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FOUND as u8) })
}
