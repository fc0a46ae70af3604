//! Carries out a command line, in any process.

use std::{
    ffi::{OsStr, OsString},
    os::unix::process::CommandExt,
    path::Path,
    process,
};

use clap::{CommandFactory, error::ErrorKind};
use drumline::{Outlet, Section, outer_job};
use drumline_launch::{
    Job, flush,
    foreign::{Program, enter},
    keep,
    program::{self, ProgramKind},
    run,
};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};

#[cfg(feature = "bench")]
use crate::bench;
use crate::{
    Error, Result, check,
    cli::{self, Asked, Cli, Command, EnvArgs, FIRST, Host, Names, Refusal, TraceCommand},
    output::print,
    secret, trace,
};

/// Runs the command line `drumline ...` and returns its exit code. `arguments` begin with the name of
/// the program.
///
/// `itself` is a command that calls this function again in a new process, with further arguments after its
/// own. The keeper of the ranks is started like this. Empty: the binary of this process.
///
/// ```
/// use drumline_cli::main;
///
/// let drumline = |argument: &str| main(["drumline".into(), argument.into()], []);
/// assert_eq!(drumline("--version"), 0);
/// assert_eq!(drumline("rum"), 2); // there is no such command
/// ```
pub fn main(
    arguments: impl IntoIterator<Item = OsString>,
    itself: impl IntoIterator<Item = OsString>,
) -> u8 {
    let code = command_line(arguments.into_iter().collect(), itself.into_iter().collect());
    flush();
    code
}

fn command_line(arguments: Vec<OsString>, itself: Vec<OsString>) -> u8 {
    if arguments.len() < 2 {
        say(&format!("{FIRST}\n\nAll commands: drumline --help"));
        return 2;
    }
    let environment: Vec<_> = std::env::vars_os().collect();
    let outcome = match cli::parse(&arguments, &environment, &Host::this()) {
        Ok((command, names)) => carry_out(command, &names, arguments.into_iter().skip(1), itself),
        Err(error) => {
            let code = refuse(&error);
            if let Some(tip) = tip(&error, &arguments[1]) {
                say(&format!("\n  tip: {tip}"));
            }
            return code;
        }
    };
    outcome.unwrap_or_else(|error| {
        say(&format!("drumline: {error}"));
        error.exit_code()
    })
}

/// Writes these lines to stderr.
fn say(lines: &str) {
    Outlet::stderr().say(format!("{lines}\n").as_bytes());
}

/// Why `drumline run` refuses this command line before it starts anything. `None`: it does not. Variables do not
/// count as options.
///
/// ```
/// let refusal = |option: &str| drumline_cli::refusal(["drumline", "run", option, "train"].map(Into::into));
/// assert_eq!(refusal("--nnodes=1"), None);
/// assert!(refusal("--nproc-per-node=none").is_some_and(|why| why.contains("none")));
/// ```
pub fn refusal(arguments: impl IntoIterator<Item = OsString>) -> Option<String> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    match cli::parse(&arguments, &[], &Host::this()) {
        Ok((command @ Command::Run(_), names)) => {
            command.asked(&names, &Host::this())?.err().map(|refused| refused.text)
        }
        Ok(_) => None,
        Err(error) => Some(cli::first_paragraph(&error)),
    }
}

/// Prints the error, which may be the text of --help, and returns the exit code.
fn refuse(error: &clap::Error) -> u8 {
    let _ = error.print();
    u8::try_from(error.exit_code()).unwrap_or(2)
}

/// The commands that this program is built without, and why they are not there.
const LEFT_OUT: &[(&str, &str)] = &[
    #[cfg(not(feature = "bench"))]
    ("bench", "this program is built without the feature `bench`"),
    #[cfg(not(feature = "pages"))]
    ("man", "this program is built without the feature `pages`"),
];

/// What someone meant who writes `drumline train.py`, or an option of torchrun.
fn tip(error: &clap::Error, first: &OsStr) -> Option<&'static str> {
    if let Some((_, why)) = LEFT_OUT.iter().find(|(name, _)| first == *name) {
        return Some(why);
    }
    if !matches!(error.kind(), ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand) {
        return None;
    }
    match Cli::command().find_subcommand(first) {
        None => Some("to start your program: drumline run --nproc-per-node 2 -- PROGRAM"),
        Some(run) if run.get_name() == "run" => {
            Some("options of your program stand behind it, those of drumline in front of `--`")
        }
        Some(_) => None,
    }
}

/// Whether it may have something to tell beside its output.
fn is_logged(command: &Command) -> bool {
    match command {
        #[cfg(feature = "pages")]
        Command::Man { .. } => false,
        Command::Explain { .. } | Command::Trace(_) | Command::KeepRanks { .. } => false,
        _ => true,
    }
}

fn carry_out(
    command: Command,
    names: &Names,
    arguments: impl Iterator<Item = OsString>,
    itself: Vec<OsString>,
) -> Result<u8> {
    if is_logged(&command) {
        log_to_stderr();
    }
    match command {
        Command::Run(args) => match args.completion() {
            Some(shell) => print(&cli::completion(shell)).map(|()| 0),
            None => start("run", names, args.asked(names, &Host::this()), arguments, itself),
        },
        Command::Launch(args) => match args.completion() {
            Some(shell) => print(&cli::completion(shell)).map(|()| 0),
            None => start("launch", names, args.asked(names, &Host::this()), arguments, itself),
        },
        Command::Env(args) => env(args, &itself),
        Command::Check { json } => check(json),
        #[cfg(feature = "bench")]
        Command::Bench { options, rseq } => bench::measure(&options, rseq, arguments, itself),
        Command::Trace(TraceCommand::Merge { dir, out }) => trace::merge(&dir, out.as_deref()),
        Command::Trace(TraceCommand::Page { dir, out }) => trace::page(&dir, out.as_deref()),
        Command::Trace(TraceCommand::Summary { dir }) => trace::summary(&dir),
        Command::Explain { name } => {
            let told = Section::find(&name).map(Section::explanation);
            print(&format!("{}\n", told.unwrap_or_default())).map(|()| 0)
        }
        Command::Secret { file } => {
            secret::write(&file)?;
            print(&format!("{} has a new secret: copy it to every host\n", file.display()))?;
            Ok(0)
        }
        #[cfg(feature = "pages")]
        Command::Man { command } => match cli::manual(command.as_deref()).map_err(Error::Print)? {
            Some(page) => print(&page).map(|()| 0),
            None => Ok(refuse(&cli::refusal("man", "there is no such command"))),
        },
        Command::KeepRanks { .. } => {
            keep()?;
            Ok(0)
        }
    }
}

/// Starts what the command `name` asks for.
fn start(
    name: &str,
    names: &Names,
    asked: Result<Asked, Refusal>,
    arguments: impl Iterator<Item = OsString>,
    itself: Vec<OsString>,
) -> Result<u8> {
    let Asked { job, kind, ignored } = match asked {
        Ok(asked) => asked,
        Err(Refusal { text, .. }) => return Ok(refuse(&cli::refusal(name, &text))),
    };
    for why in &names.left_out {
        tracing::warn!("{why}");
    }
    if !names.listed().is_empty() {
        tracing::info!("options from the environment: {}", names.listed());
    }
    if !ignored.is_empty() {
        tracing::warn!("this has no effect here: {}", ignored.join(", "));
    }
    let outer = outer_job::variables();
    if !outer.is_empty() {
        return Err(begin_again(&itself, arguments, &outer));
    }
    let (program, arguments) = kind.command(job.program, job.arguments, || python(&itself))?;
    Ok(run(&Job { program, arguments, relaunch: itself, ..job })?)
}

/// Replaces this process by the same command without the variables of an outer job. They would count as settings of the
/// user. Returns only if that fails.
fn begin_again(
    itself: &[OsString],
    arguments: impl Iterator<Item = OsString>,
    outer: &[String],
) -> Error {
    let mut words = itself.iter().cloned();
    let mut command =
        process::Command::new(words.next().unwrap_or_else(|| "/proc/self/exe".into()));
    command.args(words).args(arguments);
    for name in outer {
        command.env_remove(name);
    }
    flush();
    Error::BeginAgain(command.exec())
}

/// Becomes the program, as a rank of the launcher that has started this process.
fn env(args: EnvArgs, itself: &[OsString]) -> Result<u8> {
    let EnvArgs { command, print: prints, timeout } = args;
    let mut words = command.into_iter();
    let name = words.next().unwrap_or_default();
    if prints {
        let entry = enter(timeout)?;
        let lines = entry.variables().iter().map(|(name, value)| format!("{name}={value}\n"));
        return print(&lines.collect::<String>()).map(|()| 0);
    }
    let (name, arguments) = ProgramKind::Named.command(name, words.collect(), || python(itself))?;
    let program = Program::find(&name, arguments)?;
    let entry = enter(timeout)?;
    flush();
    Err(entry.exec(&program).into())
}

/// The interpreter. The program that runs this code is the binary of a wheel, or the interpreter itself.
fn python(itself: &[OsString]) -> OsString {
    let neighbour = itself.first().map(|first| Path::new(first).to_owned());
    let neighbour = neighbour.or_else(|| std::env::current_exe().ok());
    program::python(std::env::var_os("PYTHON_EXEC"), neighbour.as_deref())
}

/// Logs what `RUST_LOG` selects; warnings if it is not set.
fn log_to_stderr() {
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let wanted = std::env::var("RUST_LOG").ok().filter(|wanted| !wanted.is_empty());
    let targets = wanted.and_then(|wanted| wanted.parse().ok());
    let targets = targets.unwrap_or_else(|| Targets::new().with_default(LevelFilter::WARN));
    let to_stderr = tracing_subscriber::fmt::layer()
        .with_writer(drumline::log::stderr)
        .with_ansi(Outlet::stderr().is_terminal() && !is_plain)
        .log_internal_errors(false);
    // The process of another program may have a log already.
    let _ = tracing_subscriber::registry().with(to_stderr).with(targets).try_init();
}
