//! The command line.
//!
//! ```text
//! arguments, PET_... ─► variables ─► Command ─► RunArgs ─► Job, what means nothing, or an error
//!                                     hosts, ranks, output, ...: the options of one heading each
//! ```

mod compatibility;
mod ending;
mod env;
mod hangs;
mod host;
mod hosts;
mod monitoring;
mod names;
mod nearest;
mod output;
#[cfg(feature = "pages")]
mod pages;
#[cfg(not(feature = "pages"))]
#[path = "without_pages.rs"]
mod pages;
mod ranks;
mod rendezvous;
mod restarts;
mod rseq;
mod run;
mod store;
mod time;
mod variables;

#[cfg(test)]
mod tests;

#[cfg(feature = "pages")]
use std::io;
use std::{ffi::OsString, path::PathBuf};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, builder::PossibleValuesParser};
use drumline::Section;
#[cfg(feature = "bench")]
use drumline_bench::BenchOptions;
use drumline_launch::KEEP_SUBCOMMAND;

use self::pages::Shell;
#[cfg(feature = "bench")]
pub(crate) use self::rseq::Rseq;
pub(crate) use self::{
    env::EnvArgs,
    host::Host,
    names::{Names, Refusal},
    run::{Asked, LaunchArgs, RunArgs},
    variables::first_paragraph,
};

/// Synchronous data-parallel training: run it, measure it, find out what went wrong.
#[derive(Debug, Parser)]
#[command(name = "drumline", version, after_help = FIRST)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to begin with.
pub(crate) const FIRST: &str = "\
To begin with:
  drumline check                                        # does everything work on this host?
  drumline run --nproc-per-node 2 -- python train.py    # your program, on two processes
  drumline bench                                        # how fast are collectives here?";

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a program once per rank, on this host or on many
    #[command(after_help = RUN_HELP, infer_long_args = true, args_override_self = true)]
    Run(Box<RunArgs>),

    /// Run scripts that expect --local-rank=N, as torch.distributed.launch does
    #[command(after_help = LAUNCH_HELP, infer_long_args = true, args_override_self = true)]
    Launch(Box<LaunchArgs>),

    /// Run a program in a rank that mpirun, mpiexec or srun has started, with the variables of torchrun
    #[command(after_help = ENV_HELP, args_override_self = true)]
    Env(EnvArgs),

    /// Show what every rank did, and when
    #[command(subcommand, after_help = TRACE_HELP)]
    Trace(TraceCommand),

    /// Try every collective over every transport, and describe this host
    #[command(after_help = CHECK_HELP)]
    Check {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },

    /// Time collectives, and verify every result
    #[cfg(feature = "bench")]
    Bench {
        #[command(flatten)]
        rseq: Rseq,

        #[command(flatten)]
        options: Box<BenchOptions>,
    },

    /// Tell more about an error, which ends with the name of its explanation
    #[command(after_help = EXPLAIN_HELP)]
    Explain {
        /// The name
        #[arg(value_parser = PossibleValuesParser::new(Section::ALL.iter().map(|it| it.name())))]
        name: String,
    },

    /// Make a secret for a job on several hosts
    #[command(after_help = SECRET_HELP)]
    Secret {
        /// The file to write; it must not exist
        file: PathBuf,
    },

    /// Print a page of the manual: drumline man run | man -l -
    #[cfg(feature = "pages")]
    #[command(hide = true)]
    Man {
        /// The command that the page is about
        command: Option<String>,
    },

    #[command(name = KEEP_SUBCOMMAND, hide = true)]
    KeepRanks {
        /// What one keeper tells the next: `keep` reads it
        _told: Vec<OsString>,
    },
}

impl Command {
    /// The job that it asks for. `None`: it is about none.
    pub(crate) fn asked(self, names: &Names, host: &Host<'_>) -> Option<Result<Asked, Refusal>> {
        match self {
            Command::Run(args) if args.completion().is_none() => Some(args.asked(names, host)),
            Command::Launch(args) if args.completion().is_none() => Some(args.asked(names, host)),
            _ => None,
        }
    }
}

const ENV_HELP: &str = "\
Started once per rank by mpirun, mpiexec or srun, it sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, \
MASTER_ADDR and MASTER_PORT by what the launcher has set, and replaces itself by the program. The ranks agree on the \
address of rank 0, a free port and a secret. MASTER_ADDR, MASTER_PORT, DRUMLINE_SECRET and DRUMLINE_SECRET_FILE win \
where you have set them.

Examples:
  mpirun -n 4 drumline env -- python train.py
  srun --mpi=pmi2 drumline env -- python train.py
  mpirun -n 4 drumline env --print";

const EXPLAIN_HELP: &str = "\
Example:
  drumline explain peer_exited";

const SECRET_HELP: &str = "\
Only you can read the file (mode 600). Copy it to every host, and name it there by DRUMLINE_SECRET_FILE. A command line
would show a secret to all users of the host, so no option takes one.

Example:
  drumline secret ~/job-secret
  scp -p ~/job-secret host1:
  DRUMLINE_SECRET_FILE=~/job-secret drumline run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0 train.py";

const CHECK_HELP: &str = "\
The exit code is 1 if something does not work. The settings in DRUMLINE_* apply as in a program.

Examples:
  drumline check
  DRUMLINE_SHARED_MEMORY=0 drumline check --json        # as JSON, without shared memory";

const TRACE_HELP: &str = "\
A job that is started with DRUMLINE_TRACE=DIR writes DIR/rank-N.json for every rank.

Example:
  DRUMLINE_TRACE=trace drumline run --nproc-per-node 2 -- ./train
  drumline trace summary trace
  drumline trace page trace      # and open trace/trace.html in a browser
  drumline trace merge trace     # and open trace/trace.json at https://ui.perfetto.dev";

const MERGE_HELP: &str = "\
Example:
  drumline trace merge trace -o job.json     # and open job.json at https://ui.perfetto.dev";

const PAGE_HELP: &str = "\
Example:
  drumline trace page trace      # and open trace/trace.html in a browser";

const SUMMARY_HELP: &str = "\
Example:
  drumline trace summary trace";

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum TraceCommand {
    /// Make one file that shows all ranks below each other
    #[command(after_help = MERGE_HELP)]
    Merge {
        /// The directory with the files of the ranks
        dir: PathBuf,

        /// The file to write [default: trace.json in DIR]
        #[arg(short = 'o', long = "out", value_name = "FILE")]
        out: Option<PathBuf>,
    },

    /// Make one page of HTML that shows all ranks in a browser, without a network
    #[command(after_help = PAGE_HELP)]
    Page {
        /// The directory with the files of the ranks
        dir: PathBuf,

        /// The file to write [default: trace.html in DIR]
        #[arg(short = 'o', long = "out", value_name = "FILE")]
        out: Option<PathBuf>,
    },

    /// Print how long everything took, and which rank the others waited for
    #[command(after_help = SUMMARY_HELP)]
    Summary {
        /// The directory with the files of the ranks
        dir: PathBuf,
    },
}

const RUN_HELP: &str = "\
All options of torchrun have their two spellings (--rdzv-id, --rdzv_id) and their variable (PET_RDZV_ID). An \
option beats the variable. docs/reference/launcher.md says where Drumline differs from torchrun.

Each rank gets the environment of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT \
and so on. Several ranks also get OMP_NUM_THREADS=1 if the variable is not set. If a rank fails, the \
others are ended, and its exit code is returned (128 + n after signal n).

--disable-rseq sets glibc.pthread.rseq=0 in the GLIBC_TUNABLES of every rank, unless you have set \
glibc.pthread.rseq there. glibc then registers no restartable sequences, and the kernel switches \
faster between ranks that share cores: short calls take about six per cent less time. With a core for \
each rank it gains nothing. Do not use it if a library of yours, such as an allocator, needs them.

Examples:
  drumline run --nproc-per-node 2 train.py --epochs 3        # a Python script
  drumline run --nproc-per-node auto -- ./train --epochs 3   # any program, on every GPU or core
  drumline run --nproc-per-node 2 --max-restarts 3 --log-dir logs --tee 3 train.py
  drumline run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint host0 --nproc-per-node gpu train.py
  drumline run --print-completion bash > /etc/bash_completion.d/drumline";

const LAUNCH_HELP: &str = "\
Everything else is as for `drumline run`. In a new script, read LOCAL_RANK in the environment, and use `drumline run`.

Examples:
  drumline launch --nproc-per-node 2 train.py --epochs 3
  drumline launch --use-env --nproc-per-node 2 train.py";

/// What the arguments, which begin with the name of the program, ask for; and which options variables gave.
///
/// Operators set variables in all containers, whatever runs there. If one contradicts what is typed, or another
/// variable, it is left out. Options that are typed and contradict each other remain.
pub(crate) fn parse(
    arguments: &[OsString],
    environment: &[(OsString, OsString)],
    host: &Host<'_>,
) -> Result<(Command, Names), clap::Error> {
    let mut definition = definition();
    let mut parse = |left_out: &[String]| -> Result<(Command, Names), clap::Error> {
        let (matches, names) = variables::parse(&mut definition, arguments, environment, left_out)?;
        Ok((Cli::from_arg_matches(&matches)?.command, names))
    };
    let first = parse(&[])?;
    let (mut command, mut names) = (first.0.clone(), first.1.clone());
    let (mut left_out, mut told) = (Vec::new(), Vec::new());
    loop {
        let refused = command.clone().asked(&names, host).and_then(Result::err);
        let option = refused.as_ref().and_then(|refused| refused.can_leave_out(&names));
        match (refused, option) {
            (Some(refused), Some(option)) => {
                told.push(format!("{} is left out: {}", names.of(&option), refused.text));
                left_out.push(option);
            }
            // What was left out did not help.
            (Some(_), None) => return Ok(first),
            (None, _) => break,
        }
        (command, names) = parse(&left_out)?;
    }
    names.left_out.extend(told);
    Ok((command, names))
}

/// The error that says `text` about the command `name`.
pub(crate) fn refusal(name: &str, text: &str) -> clap::Error {
    let mut command = definition();
    command.build();
    variables::refusal(&mut command, name, text)
}

/// The script that makes a shell complete the command line.
pub(crate) fn completion(shell: Shell) -> String {
    pages::completion(definition(), shell)
}

/// The page of the manual about a command. `None`: there is no such command.
#[cfg(feature = "pages")]
pub(crate) fn manual(command: Option<&str>) -> io::Result<Option<String>> {
    pages::manual(definition(), command)
}

fn definition() -> clap::Command {
    variables::with_both_spellings(Cli::command())
}
