//! `drumline run` and `drumline launch`: from options to a job.

use std::ffi::OsString;

use clap::Args;
use drumline_launch::{Job, program::ProgramKind};

use super::{
    compatibility::CompatibilityArgs,
    ending::EndingArgs,
    hangs::HangArgs,
    host::Host,
    hosts::HostArgs,
    monitoring::MonitoringArgs,
    names::{Names, Refusal},
    output::OutputArgs,
    pages::Shell,
    ranks::RankArgs,
    restarts::RestartArgs,
    store::StoreArgs,
};

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunArgs {
    /// The program of every rank, and its arguments, in which ${local_rank} stands for the local rank. What ends in
    /// .py runs under Python; everything else is found and executed as by a shell
    #[arg(
        required_unless_present = "print_completion",
        trailing_var_arg = true,
        value_name = "PROGRAM"
    )]
    command: Vec<OsString>,

    #[command(flatten, next_help_heading = "Program")]
    program: ProgramArgs,

    #[command(flatten, next_help_heading = "Ranks and hosts")]
    ranks: RankArgs,

    #[command(flatten, next_help_heading = "Ranks and hosts")]
    hosts: HostArgs,

    #[command(flatten, next_help_heading = "Restarts")]
    restarts: RestartArgs,

    #[command(flatten, next_help_heading = "Output")]
    output: OutputArgs,

    #[command(flatten, next_help_heading = "Ending")]
    ending: EndingArgs,

    #[command(flatten, next_help_heading = "Hangs")]
    hangs: HangArgs,

    #[command(flatten, next_help_heading = "Monitoring")]
    monitoring: MonitoringArgs,

    #[command(flatten, next_help_heading = "Store and security")]
    store: StoreArgs,

    #[command(flatten, next_help_heading = "Only for compatibility")]
    compatibility: CompatibilityArgs,
}

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Debug)]
struct ProgramArgs {
    /// PROGRAM is the name of a Python module
    #[arg(short = 'm', long)]
    module: bool,

    /// Execute PROGRAM as it is, also if its name ends in .py
    #[arg(long)]
    no_python: bool,

    /// Run PROGRAM under Python, whatever its name
    #[arg(long)]
    run_path: bool,

    /// Print a script that makes this shell complete the command line
    #[arg(long, value_name = "SHELL")]
    print_completion: Option<Shell>,
}

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Debug)]
pub(crate) struct LaunchArgs {
    /// Do not pass --local-rank=N: the program reads LOCAL_RANK in its environment
    #[arg(long, help_heading = "Program")]
    use_env: bool,

    #[command(flatten)]
    run: RunArgs,
}

/// What a command line asks for.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    /// The job. Its program and arguments are as they were given.
    pub(crate) job: Job,
    /// How that program is executed.
    pub(crate) kind: ProgramKind,
    /// The options, and their parts, that mean nothing here.
    pub(crate) ignored: Vec<String>,
}

impl RunArgs {
    pub(crate) fn completion(&self) -> Option<Shell> {
        self.program.print_completion
    }

    /// The error says which options contradict each other, and what to write.
    pub(crate) fn asked(self, names: &Names, host: &Host<'_>) -> Result<Asked, Refusal> {
        let kind = self.program.kind(names)?;
        let ranks = self.ranks.ranks(names, host)?;
        let place = self.hosts.place(names, host)?;
        let known = place.meeting.is_none().then_some(ranks);
        let min_ranks = self.ranks.min_ranks(known, names)?;
        let mut command = self.command.into_iter();
        let program = command.next().unwrap_or_default();
        let ignored = self.compatibility.ignored(names, host).chain(place.ignored).collect();
        let numa_binding = self.ranks.binding();
        let job = Job {
            arguments: command.collect(),
            min_ranks,
            hosts: place.hosts,
            meeting: place.meeting,
            joining: place.joining,
            run_id: place.run_id,
            torch_store: self.store.of(place.master_port, place.store_port, names)?,
            security: self.store.security,
            virtual_local_rank: self.ranks.virtual_local_rank,
            numa_binding,
            disables_rseq: self.ranks.rseq.disable_rseq,
            report: self.output.report.clone(),
            stdin: self.output.stdin(ranks.get(), names)?,
            logs: self.output.logs(ranks.get(), names, host)?,
            restarts: self.restarts.restarts(),
            policy: self.ending.policy(host)?,
            signals: self.ending.signals(),
            monitoring: self.monitoring.monitoring(host)?,
            hangs: self.hangs.hangs(names, host)?,
            role: self.ranks.role,
            ..Job::new(program, ranks)
        };
        Ok(Asked { job, kind, ignored })
    }
}

impl ProgramArgs {
    fn kind(&self, names: &Names) -> Result<ProgramKind, Refusal> {
        let asked = [
            ("module", self.module, ProgramKind::Module),
            ("run-path", self.run_path, ProgramKind::Script),
            ("no-python", self.no_python, ProgramKind::Exact),
        ];
        let mut asked = asked.into_iter().filter(|(_, is_given, _)| *is_given);
        match (asked.next(), asked.next()) {
            (Some((one, ..)), Some((other, ..))) => {
                let text = format!(
                    "{} and {} contradict each other about the program: give one of the two",
                    names.of(one),
                    names.of(other)
                );
                Err(Refusal::of(text, [one, other]))
            }
            (Some((_, _, kind)), None) => Ok(kind),
            (None, _) => Ok(ProgramKind::Named),
        }
    }
}

impl LaunchArgs {
    pub(crate) fn completion(&self) -> Option<Shell> {
        self.run.completion()
    }

    /// The same job as of `drumline run`. A script gets its local rank in front of its own arguments.
    pub(crate) fn asked(self, names: &Names, host: &Host<'_>) -> Result<Asked, Refusal> {
        let mut asked = self.run.asked(names, host)?;
        if self.use_env {
            return Ok(asked);
        }
        let Job { program, arguments, .. } = &mut asked.job;
        if !asked.kind.is_python(program) {
            return Err(Refusal::from(format!(
                "`drumline launch` passes --local-rank=N to scripts that run under Python, and {} does not: \
                 write --use-env, or drumline run",
                program.display()
            )));
        }
        arguments.insert(0, "--local-rank=${local_rank}".into());
        Ok(asked)
    }
}
